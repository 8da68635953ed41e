"""Makes tapes from a corpus of plain text (`loop.corpus`). The loop imitates them in addition to its rollouts.

The tapes are a part of the run, so resuming and `reproduce` don't need the original corpus. A text is encoded without a
chat template. If the tokenizer has tokens for the beginning and the end of a sequence, they enclose the text. The names
of control tokens in the text stay plain text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...agents.setup.setup import load_tasks
from ...tapes.errors import UsageError
from ...tapes.store.store import Store
from ..loop.loop_config import CorpusConfig
from ..loop.plan import TEXTS
from .imported import Conversation, Said, write_tape

if TYPE_CHECKING:
    from ...agents.rendering.renderer import Renderer


def read_corpus(config: CorpusConfig, renderer: Renderer) -> tuple[list[Conversation], str]:
    """Return all distinct texts, divided into parts of the configured length, and the digest of the corpus. Raises
    UsageError if a text can't be read."""
    made: list[Conversation] = []
    try:
        rows = load_tasks(config.path, count=config.count, dataset=config)
        for k, task in enumerate(rows):
            row = task.private
            if isinstance(task.public, dict) and isinstance(row, dict):
                row = task.public | row
            text, prompt = (row.get("text"), row.get("prompt", "")) if isinstance(row, dict) else (None, "")
            if not isinstance(text, str) or not isinstance(prompt, str):
                raise UsageError(f"row {k} has no text: {row!r:.200}. Set loop.corpus.columns to {{text: COLUMN}}")
            before = renderer.text_ids(prompt)
            ids = before + renderer.text_ids(text, begin=False, end=True)
            first = max(len(before), 1)  # nothing predicts the first token, so it is context
            for at in range(first, len(ids), config.tokens):
                context = ids[max(0, at - config.tokens) if at == first else at - 1 : at]
                said = ids[at : at + config.tokens]
                reply = {"role": "assistant", "content": renderer.spell(said)}
                answer = Said(reply=reply, prompt=context, completion=said)
                made.append(Conversation(id=str(k), answers=(answer,), by=TEXTS, attempt=len(made), split="corpus"))
    except UsageError as error:
        raise UsageError(f"loop.corpus: {config.path}: {error}") from error
    return made, rows.digest


def bring_in_corpus(texts: Sequence[Conversation], store: Store) -> list[str]:
    """Write the texts to `store` as tapes, and return the ids of the tapes in order. Texts from an earlier call are not
    written again."""
    written = {tape.begin.attempt: tape.id for tape in store.tapes(split="corpus", closed=True) if tape.trains}
    ids = [written.get(k) or write_tape(text, store.writer, "corpus") for k, text in enumerate(texts)]
    store.writer.sync()
    return ids
