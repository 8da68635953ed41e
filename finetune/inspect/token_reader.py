"""The text of recorded token ids, by the tokenizer that a run was recorded with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from ...agents.engines.embedded.pretrained import load_tokenizer
from ...agents.rendering.renderer import Renderer
from ...agents.setup.recorded_setup import tokenizer_folder
from ...tapes import Tape

log = logging.getLogger("tapereel.inspect")


def token_reader(
    run: Path, named: str | None, tapes: Sequence[Tape]
) -> tuple[Callable[[int], str] | None, Renderer | None]:
    """(text of a token id, renderer) by the tokenizer that the tapes were recorded with; (None, None) without it."""
    folder = named or tokenizer_folder(run)
    if folder is None:
        log.warning("the run keeps no tokenizer, so tokens are shown by number: give --tokenizer DIR")
        return None, None
    tokenizer = load_tokenizer(folder)
    renderer = Renderer(tokenizer)
    recorded = {tape.begin.versions.get("tokenizer") for tape in tapes} - {None}
    if recorded - {renderer.tokenizer_hash}:
        log.warning("the tokenizer in %s is not the one of these tapes, so tokens are shown by number", folder)
        return None, None
    return lambda token: str(tokenizer.decode([token])), renderer
