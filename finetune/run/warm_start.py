"""Warm start: copies tapes from another run and imitates them (SFT), with the same trainer and ledger as the loop.

Tapes are copied record by record, so each tape keeps its id and digest, and the accounting of the copying run covers
every token. If a call was recorded as text, its text is tokenized once here, and the tokens are added as a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...tapes import Tape
from ...tapes.errors import UsageError
from ...tapes.records import Label, Status, Tokens
from ...tapes.store.media import references
from ...tapes.store.store import Store
from ..loop.history import History
from ..loop.loop_config import WarmStartConfig
from ..loop.metrics import imitation_line
from ..loop.plan import Plan, batch_of

if TYPE_CHECKING:
    from ...agents.rendering.renderer import Renderer

TRAINABLE_SPLITS = ("train", "demo")
CHECKPOINT_EVERY = 100
"""Updates between two checkpoints."""


def choose(
    source: str | Path, renderer: Renderer, *, split: str | None = None, min_reward: float | None = None
) -> list[str]:
    """Return the ids of the tapes in the run `source` that match the filters and may be imitated, oldest first.

    Raises UsageError if `source` isn't a run, `split` is held out, no tape matches, or a tape has another tokenizer.
    """
    if split is not None and split not in TRAINABLE_SPLITS:
        raise UsageError(f"split {split!r} is held out: imitate tapes of {' or '.join(TRAINABLE_SPLITS)}")
    ids: list[str] = []
    with Store.open(source) as store:
        for tape in store.tapes(split=split, min_reward=min_reward, closed=True):
            if tape.begin.split in TRAINABLE_SPLITS and tape.trains and tape.calls:
                _check_tokens(tape, renderer, source)
                ids.append(tape.id)
    if not ids:
        wanted = f"of split {split or ' or '.join(TRAINABLE_SPLITS)}, which ended without an error"
        if min_reward is not None:
            wanted += f", with a reward of {min_reward:g} or more"
        raise UsageError(f"{source} has no tape to imitate: {wanted}")
    return ids


def bring_in(source: str | Path, ids: Sequence[str], into: Store, renderer: Renderer) -> list[str]:
    """Copy these tapes from the run `source`, except those that an earlier call copied. Return the given ids, without
    the tapes that aren't complete in `into`."""
    there = {summary.id for summary in into.summaries()}
    with Store.open(source) as store:
        store.refresh()
        for name in ids:
            if name not in there:
                _copy(store.tape(name, refresh=False), store, into, renderer, there)
    into.writer.sync()
    # If a process was killed while it copied a tape, this tape is `crashed` and must not be imitated. It can't be
    # copied again, because an id can occur only once in a store.
    crashed = {summary.id for summary in into.summaries(status=Status.CRASHED)}
    return [name for name in ids if name not in crashed]


def _check_tokens(tape: Tape, renderer: Renderer, source: str | Path) -> None:
    recorded = tape.begin.versions.get("tokenizer")
    if recorded is not None and recorded != renderer.tokenizer_hash:
        raise UsageError(
            f"tape {tape.id} of {source} was recorded with another tokenizer ({recorded[:12]}) than the "
            f"model's ({renderer.tokenizer_hash[:12]}): its token ids mean other text to this model"
        )


def _copy(tape: Tape, source: Store, into: Store, renderer: Renderer, there: set[str]) -> None:
    parent = tape.begin.parent
    # A fork contains only its own turns, so its parent must be copied first.
    if parent is not None and parent.tape not in there:
        _copy(source.tape(parent.tape, refresh=False), source, into, renderer, there)
    for name in sorted({name for body in tape.bodies for name in references(body)}):
        into.media.put(source.media.get(f"media:{name}"), Path(name).suffix)
    for body in tape.bodies:
        into.writer.append(body)
    left_out = [Label(tape=tape.id, call=call, use="discarded") for call in tape.not_taken]
    for layer in [*left_out, *tape.layers, *_missing_tokens(tape, renderer)]:
        into.append_layer(layer)
    there.add(tape.id)


def _missing_tokens(tape: Tape, renderer: Renderer) -> Sequence[Tokens]:
    """Return a layer of tokens for each call that was recorded as text and has no layer of tokens yet."""
    layered = {layer.call for layer in tape.layers if isinstance(layer, Tokens)}
    made = []
    for call in tape.calls:
        if call.completion is None and call.call not in layered and call.finish != "error":
            ids, said, places = renderer.authored(call.messages, call.reply, tape.call_tools(call))
            layer = Tokens(
                tape=tape.id, call=call.call, prompt=ids, places=places, completion=said, tokenizer=renderer.hash
            )
            made.append(layer)
    return made


def warm_start(
    config: WarmStartConfig,
    *,
    history: History,
    tapes: Sequence[str],
    seed: int = 0,
    agents: tuple[str, ...] | None = None,
    on_update: Callable[[int, dict[str, object]], None] | None = None,
) -> None:
    """Train on these tapes in the history's store until the history has the configured number of updates.

    Updates that the history already has count too. Each new update is recorded in the ledger, and the last one gets a
    pinned checkpoint. `agents` are the paths of the agents to imitate; None imitates all agents.
    """
    store = history.store
    while history.updates < config.updates:
        plan = Plan(phase="sft", tapes=batch_of(tapes, history.updates, config.batch, seed), agents=agents)
        stats, uses = history.update(plan, history.from_store)
        for use in uses:
            store.append_layer(use)
        if on_update is not None:
            on_update(history.updates, imitation_line(stats, uses))
        if history.updates % CHECKPOINT_EVERY == 0 and history.updates < config.updates:
            # The records must be durable before the checkpoint, because a checkpoint with updates that aren't recorded
            # can't be used to resume.
            store.writer.sync()
            history.checkpoint()
    store.writer.sync()
    history.settle()
