"""Tapes of another run, brought in to be imitated.

They are copied record by record, so each keeps its id and its digest, and the books of the run that trains on them
close by themselves. Text that nobody tokenized gets its tokens here, once, as a layer. What is done with the tapes is
not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...tapes import Tape
from ...tapes.errors import UsageError
from ...tapes.records import Status, Tokens
from ...tapes.store.store import Store

TRAINABLE_SPLITS = ("train", "demo")


def choose(
    source: str | Path, renderer: Any, *, split: str | None = None, min_reward: float | None = None
) -> list[str]:
    """Ids of the tapes of the run `source` that may be imitated and fit, in the order of their begin.

    UsageError where nothing fits, where a tape was tokenized for another model, or where `split` is one that is held
    out; NoRun where there is no such run.
    """
    if split is not None and split not in TRAINABLE_SPLITS:
        raise UsageError(f"split {split!r} is held out: tapes to imitate are of {' or '.join(TRAINABLE_SPLITS)}")
    ids: list[str] = []
    with Store.open(source) as store:
        for tape in store.tapes(split=split, min_reward=min_reward, closed=True):
            if tape.begin.split in TRAINABLE_SPLITS and tape.trains and tape.calls:
                _check_tokens(tape, renderer, source)
                ids.append(tape.id)
    if not ids:
        wanted = f"of split {split or ' or '.join(TRAINABLE_SPLITS)}, ended in a way that may be trained on"
        if min_reward is not None:
            wanted += f", with a reward of {min_reward:g} or more"
        raise UsageError(f"{source} has no tape to imitate: {wanted}")
    return ids


def bring_in(source: str | Path, ids: Sequence[str], into: Store, renderer: Any) -> list[str]:
    """Copy these tapes of the run `source`; gives the ids of those that are whole there now, in the same order.

    What an earlier call copied is not copied again.
    """
    there = {summary.id for summary in into.summaries()}
    with Store.open(source) as store:
        store.refresh()
        for name in ids:
            if name not in there:
                _copy(store.tape(name, refresh=False), store, into, renderer, there)
    into.writer.sync()
    # A process that was killed while it copied a tape has left it `crashed`; it can't be copied twice.
    crashed = {summary.id for summary in into.summaries(status=Status.CRASHED)}
    return [name for name in ids if name not in crashed]


def _check_tokens(tape: Tape, renderer: Any, source: str | Path) -> None:
    recorded = tape.begin.versions.get("tokenizer")
    if recorded is not None and recorded != renderer.tokenizer_hash:
        raise UsageError(
            f"tape {tape.id} of {source} was recorded with another tokenizer ({recorded[:12]}) than the "
            f"model's ({renderer.tokenizer_hash[:12]}): its tokens mean other text to this model"
        )


def _copy(tape: Tape, source: Store, into: Store, renderer: Any, there: set[str]) -> None:
    parent = tape.begin.parent
    if parent is not None and parent.tape not in there:
        _copy(source.tape(parent.tape, refresh=False), source, into, renderer, there)
    for body in tape.bodies:
        into.writer.append(body)
    for layer in [*tape.layers, *_missing_tokens(tape, renderer)]:
        into.append_layer(layer)
    there.add(tape.id)


def _missing_tokens(tape: Tape, renderer: Any) -> Sequence[Tokens]:
    """A layer for each call of text that has no tokens yet."""
    layered = {layer.call for layer in tape.layers if isinstance(layer, Tokens)}
    made = []
    for call in tape.calls:
        if call.completion is None and call.call not in layered and call.finish != "error":
            prompt, completion = renderer.authored(tape.call_messages(call), call.reply)
            made.append(
                Tokens(tape=tape.id, call=call.call, prompt=prompt, completion=completion, tokenizer=renderer.hash)
            )
    return made
