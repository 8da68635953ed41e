"""Decodes recorded token ids with the tokenizer that the run was recorded with."""

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
    """(decoder of a token id, renderer) of the tapes' own tokenizer; (None, None) where that is missing or another."""
    folder = named or tokenizer_folder(run)
    if folder is None:
        log.warning("the run has no tokenizer, so tokens are shown as numbers: name its folder by --tokenizer DIR")
        return None, None
    tokenizer = load_tokenizer(folder)
    renderer = Renderer(tokenizer)
    recorded = {tape.begin.versions.get("tokenizer") for tape in tapes} - {None}
    if recorded - {renderer.tokenizer_hash}:
        log.warning("tokens are shown as numbers: the tokenizer in %s is not the tokenizer of these tapes", folder)
        return None, None
    return lambda token: str(tokenizer.decode([token])), renderer
