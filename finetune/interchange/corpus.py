"""A corpus of plain texts that the loop imitates beside its rollouts (`loop.corpus`).

Its texts become tapes of the run, so resume and `reproduce` read the run alone. A text is encoded without a chat
template, after the tokenizer's begin of sequence where it has one, and ends with the end of sequence. Control tokens in
it stay text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ...agents.setup.setup import DatasetConfig, load_tasks
from ...tapes.errors import UsageError
from ...tapes.records import CORPUS
from ...tapes.store.store import Store
from ..history.loop_config import CorpusConfig
from ..history.plan import TEXTS
from .story import Story, Turn, write_story

if TYPE_CHECKING:
    from ...agents.rendering.renderer import Renderer


def read_corpus(config: CorpusConfig, renderer: Renderer) -> list[Story]:
    """A story for each part of each distinct text. UsageError where the corpus can't be read or lacks a column."""
    stories: list[Story] = []
    try:
        found = load_tasks(
            config.path, count=config.count, dataset=DatasetConfig(split=config.split, config=config.config)
        )
        for k, task in enumerate(found):
            before = renderer.text_ids("" if config.prompt is None else _text(task.private, config.prompt, k))
            ids = before + renderer.text_ids(_text(task.private, config.column, k), begin=False, end=True)
            first = max(len(before), 1)
            for at in range(first, len(ids), config.tokens):
                # The first token is never learned: nothing predicts it. A later part begins with one token of context.
                prompt = ids[max(0, at - config.tokens) : at] if at == first else ids[at - 1 : at]
                said = ids[at : at + config.tokens]
                reply = {"role": "assistant", "content": renderer.spell(said)}
                turn = Turn(name="text", by=TEXTS, messages=(), reply=reply, prompt=prompt, completion=said)
                stories.append(Story(id=str(k), turns=(turn,), attempt=len(stories), split=CORPUS))
    except UsageError as error:
        raise UsageError(f"loop.corpus: {config.path}: {error}") from error
    return stories


def _text(row: object, column: str, k: int) -> str:
    text = row.get(column) if isinstance(row, Mapping) else None
    if not isinstance(text, str):
        has = ", ".join(map(repr, row)) if isinstance(row, Mapping) else f"no columns: {row!r:.60}"
        raise UsageError(f"row {k} has no text in the column {column!r}; it has {has}. Set loop.corpus.column")
    return text


def corpus_digest(stories: Sequence[Story]) -> str:
    """SHA-256 (hex) of the stories."""
    return hashlib.sha256("".join(story.content for story in stories).encode()).hexdigest()


def bring_in_corpus(stories: Sequence[Story], digest: str | None, store: Store) -> list[str]:
    """Write the stories to `store` as tapes, unless an earlier call has; returns the tapes' ids, in order.

    digest: that of the corpus when the run began. UsageError where the stories have another."""
    if corpus_digest(stories) != digest:
        raise UsageError(
            "loop.corpus has other texts than when the run began, and the run was interrupted before it had copied "
            "them: restore the corpus, or choose another --out"
        )
    written = {tape.begin.attempt: tape.id for tape in store.tapes(split=CORPUS, closed=True) if tape.trains}
    ids = [written.get(k) or write_story(story, store.writer, CORPUS) for k, story in enumerate(stories)]
    store.writer.sync()
    return ids
