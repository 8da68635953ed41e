"""Requery: scores recorded tokens with a model again, and compares the log-probs with those on tape.

This checks that a tape's tokens come from the policy that the tape names. Each token is scored (teacher-forced) with
the weights of its recorded version, or with weights that the caller names. The weights come from checkpoints and model
folders. If the weights of a version are missing, its tokens can't be verified.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...agents.engines.embedded.pretrained import (
    Pretrained,
    earlier_digest,
    load_pretrained,
    load_weights,
    weights_digest,
)
from ...agents.setup.recorded_setup import recorded_rendering
from ...agents.vision.vision import BadPlace, VideoTokens
from ...tapes import Tape
from ...tapes.audit.checking import chosen_tapes, torn_tails
from ...tapes.audit.verdict import Divergence, Likely, Verdict, Verdicts, diverged, unverifiable, verified
from ...tapes.common.hub import local_folder
from ...tapes.common.progress import Progress, silent
from ...tapes.errors import UsageError
from ...tapes.records import Publish
from ...tapes.store.run_directory import recorded_settings
from ...tapes.store.store import Store
from ..data.rows import Row, rows
from ..trainer.checkpoint import Checkpoint, checkpoint_folders, checkpoints
from ..trainer.logprobs import score

TOLERANCE = 1e-4
"""Two log-probs in float32 count as equal up to this difference in nats. It is ten times the observed rounding error,
but less than the effect of one update."""
BATCH = 128
"""Number of tapes that are scored in one call of `requery`."""


@dataclass(frozen=True)
class Policy:
    """Weights of a policy that can be loaded."""

    name: str
    """The folder with the weights, as messages show it."""
    digest: str
    """Digest of the weights, as in the `publish` records of a run."""
    load: Callable[[], Pretrained] = field(repr=False)
    """Loads the model with these weights."""
    version: str | None = None
    """The version of a checkpoint, or None for a model folder."""


class Policies:
    """Finds the weights of a policy version in the run's checkpoints and model folders, or in a named folder."""

    def __init__(
        self, run: Path, published: Sequence[Publish], *, only: str | None = None, begun: Sequence[str] = ()
    ) -> None:
        """`only` is a checkpoint or model folder that scores all tokens, whichever version the tapes name. `begun` are
        the model folders that the run began with."""
        self.run = run
        self.digests = {publish.version: publish.digest for publish in published}
        self._video: VideoTokens = recorded_rendering(run).video
        self.only = _folder(Path(only), self._video) if only is not None else None
        self._known: dict[str, Policy] | None = None
        self._begun = begun
        self._loaded: tuple[str, Pretrained] | None = None

    def of(self, version: str) -> Policy | str:
        """Return the weights of a version, or the reason why they are missing as a string."""
        if self.only is not None:
            return self.only
        digest = self.digests.get(version)
        if digest is None:
            return f"version {version!r} was never published in {self.run}"
        if self._known is None:
            saved = [one for folder in checkpoint_folders(self.run) for one in checkpoints(folder)]
            found = [_checkpoint(one, self._video) for one in saved]
            begun = [folder for name in self._begun if (folder := local_folder(name)) is not None]
            found += [_folder(folder, self._video) for folder in begun]
            self._known = {policy.digest: policy for policy in found}
            missing = {name for name, one in self.digests.items() if one not in self._known}
            for policy in found if missing else ():
                if policy.version is None or policy.version in missing:
                    # An earlier version of this package may have written its `publish` record or its checkpoint.
                    state = policy.load().model.state_dict()
                    self._known |= {earlier_digest(state): policy, weights_digest(state): policy}
        return self._known.get(digest) or f"no checkpoint holds the weights of version {version!r}"

    def loaded(self, policy: Policy) -> Pretrained:
        """Return the model with these weights. Only the last model stays in memory."""
        if self._loaded is None or self._loaded[0] != policy.digest:
            self._loaded = (policy.digest, policy.load())
        return self._loaded[1]

    def logprobs(self, policy: Policy, rows: Sequence[Row]) -> NDArray[np.float64]:
        """Return the log-probs (T,) under these weights of the tokens that agents produced in `rows`."""
        found = self.loaded(policy)
        return score(found.model, rows, vision=found.vision).logprob.double().cpu().numpy()


def _checkpoint(one: Checkpoint, video: VideoTokens) -> Policy:
    def load() -> Pretrained:
        weights = one.weights()
        narrow = any(tensor.dtype == torch.bfloat16 for tensor in weights.values())
        dtype = "bfloat16" if narrow else "float32"
        quantised = any(".quant_state." in name for name in weights)
        found = load_pretrained(one.path / "hf", device="auto", dtype=dtype, video=video, quantise=quantised)
        load_weights(found.model, weights)
        return found

    return Policy(str(one.path), str(one.state["digest"]), load, one.state.get("version"))


def _folder(path: Path, video: VideoTokens) -> Policy:
    """Return the weights in the directory of a checkpoint, or of a model in Hugging Face format."""
    if (path / "state.json").is_file():
        return _checkpoint(next(one for one in checkpoints(path.parent) if one.path == path), video)
    found = load_pretrained(path, device="auto", video=video)
    return Policy(str(path), weights_digest(found.model.state_dict()), lambda: found)


@dataclass(frozen=True)
class Scored:
    """The tokens of a row that one version of a policy sampled, and their log-probs under the weights of this
    version."""

    row: Row
    logprob: NDArray[np.float64]
    """Log-probs (n,) of the row's own tokens."""
    policy: str

    @property
    def gap(self) -> NDArray[np.float64]:
        """|log-prob - recorded log-prob| (n,) in nats, NaN for a token whose log-prob is NaN under the weights."""
        return np.abs(self.logprob - self.row.old.astype(np.float64))


def requery_run(
    run: str | Path,
    model: str | None = None,
    *,
    tolerance: float = TOLERANCE,
    threads: int = 1,
    tapes: Sequence[str] = (),
    split: str | None = None,
    progress: Progress = silent,
) -> tuple[Verdicts, str | None]:
    """Check `tapes`, or by default all closed tapes in `split` that have sampled tokens.

    Return (verdicts, reason). The reason is None, or explains why there are no verdicts.

    `model` is a checkpoint or model folder that scores every token. With None, each token is scored with the version
    that sampled it, from the run's checkpoints and model folders. `tolerance` is the largest difference in nats that
    counts as equal. `threads` is the number of torch threads.
    """
    if tolerance < 0 or threads < 1:
        raise UsageError(
            f"tolerance is {tolerance} and threads {threads}; tolerance must be 0 or more, and threads 1 or more"
        )
    torch.set_num_threads(threads)
    started, found = time.perf_counter(), list[Verdict]()
    with Store.open(run) as store:
        torn = torn_tails(store)
        chosen = chosen_tapes(store, tapes, split)
        ids = chosen if tapes else [one.id for one in store.summaries(split=split, closed=True) if one.sampled]
        published = list(store.published.values())
        policies = Policies(store.path, published, only=model, begun=_begun(run))
        # The tapes in a batch share forward passes. Only one batch is in memory at a time.
        for k in range(0, len(ids), BATCH):
            batch = [store.tape(name, refresh=False) for name in ids[k : k + BATCH]]
            verdicts = requery(batch, policies, tolerance=tolerance)
            found += [verdict.of(tape) for verdict, tape in zip(verdicts, batch, strict=True)]
            progress("requery", len(found), len(ids), "")
    reason = (
        None
        if ids
        else f"none of the {len(chosen):,} closed tapes holds a token that a model sampled, so there is nothing to "
        "compare: scripted and text-only engines record text"
    )
    seconds = round(time.perf_counter() - started, 3)
    return Verdicts(verb="requery", run=str(run), verdicts=tuple(found), torn=tuple(torn), seconds=seconds), reason


def _begun(run: str | Path) -> list[str]:
    """Return the model folders that the run began with, including those of its players."""
    settings = recorded_settings(run)
    policies = (settings, *(settings.get("players") or {}).values())
    folders = ((policy.get("engine") or {}).get("model") for policy in policies)
    return [folder for folder in folders if isinstance(folder, str)]


def requery(tapes: Sequence[Tape], policies: Policies, *, tolerance: float = TOLERANCE) -> list[Verdict]:
    """Return the verdict on each tape. The tapes share forward passes."""
    made = [rows(tape) if any(call.completion is not None for call in tape.calls) else [] for tape in tapes]
    parts: dict[str, tuple[Policy, list[tuple[int, Row]]]] = {}
    missing: dict[int, list[str | Divergence]] = defaultdict(list)
    fitting = set[int]()
    for t, found in enumerate(made):
        for version, own in (part for row in found for part in _by_version(tapes[t], row)):
            policy = policies.of(version)
            if isinstance(policy, str):
                missing[t].append(policy)
            else:
                parts.setdefault(policy.digest, (policy, []))[1].append((t, own))
    seen: list[list[Scored]] = [[] for _ in tapes]
    for policy, batch in parts.values():
        kept = list[tuple[int, Row]]()
        for t, row in batch:
            if (obstacle := _obstacle(tapes[t], row, policies.loaded(policy), fitting)) is None:
                kept.append((t, row))
            else:
                missing[t].append(obstacle)
        if not kept:
            continue
        logprob = policies.logprobs(policy, [row for _, row in kept])
        ends = np.cumsum([len(row.own) for _, row in kept])
        for (t, row), now in zip(kept, np.split(logprob, ends[:-1]), strict=True):
            seen[t].append(Scored(row, now, policy.name))
    return [_verdict(tape, seen[t], missing[t], tolerance) for t, tape in enumerate(tapes)]


def _obstacle(tape: Tape, row: Row, found: Pretrained, fitting: set[int]) -> str | Divergence | None:
    """Return the reason why the model can't read the row's pictures as the engine did, or None if it can.

    `fitting` has the `Place.key` of the pictures that were checked before. They are skipped, and new ones are added.
    """
    recorded = tape.begin.versions.get("processor")
    if row.places and (found.vision is None or found.vision.hash != recorded):
        here = "none" if found.vision is None else found.vision.hash[:12]
        return f"processor: the tape's pictures went through {(recorded or 'none')[:12]}, and the model has {here}"
    for place in row.places:
        try:
            if place.key not in fitting and found.vision is not None and row.file is not None:
                found.vision.pixels(place, row.file)
                fitting.add(place.key)
        except BadPlace as bad:
            if bad.missing:
                return f"picture {bad.name} is gone"
            call = next(one for one in tape.calls if place.key in {p.key for p in tape.call_places(one.call)})
            return Divergence(
                tape=tape.id,
                call=call.call,
                by=call.by,
                field="places",
                recorded=[place.length, *place.grid],
                cause=Likely.RENDERING,
                sentence=f"call {call.call}: {bad}",
            )
    return None


def _by_version(tape: Tape, row: Row) -> list[tuple[str, Row]]:
    """Return one row for each version that sampled tokens, in which only the tokens of this version are own tokens.
    Tokens without a known log-prob are left out."""
    row = _as_recorded(tape, row)
    known = np.isfinite(row.old) & (row.version >= 0)
    return [(row.versions[v], row.where(known & (row.version == v))) for v in np.unique(row.version[known]).tolist()]


def _as_recorded(tape: Tape, row: Row) -> Row:
    """Return the row with the log-probs of tokens that were drawn greedily, as recorded at temperature 1, or in an
    enforced form.

    A row for training has NaN for these tokens, because they aren't samples from the policy. They can be compared here.
    """
    old, temperature = row.old.copy(), row.temperature.copy()
    for k, name in enumerate(row.calls):
        call = tape.call(name)
        if call.sampling.first_temperature is not None or call.sampling.barring:
            continue
        plain = call.sampling.model_copy(update={"temperature": call.sampling.temperature or 1.0})
        if call.logprobs is not None and not call.exact and plain.exact:
            here = row.call == k
            old[here] = np.asarray(call.logprobs, dtype=np.float32)[row.offset[here]]
            temperature[here] = plain.temperature
    return replace(row, old=old, temperature=temperature)


def _verdict(tape: Tape, seen: Sequence[Scored], missing: Sequence[str | Divergence], tolerance: float) -> Verdict:
    n = sum(len(one.row.own) for one in seen)
    known = sum(int(np.isfinite(np.asarray(call.logprobs or ())).sum()) for call in tape.calls)
    more: dict[str, Any] = {"checked": {"tokens": n}}
    if n:
        every = np.concatenate([one.gap for one in seen])
        more["measured"] = {"largest": float(every.max()), "mean": float(every.mean()), "tolerance": tolerance}
    notes = list(dict.fromkeys(one for one in missing if isinstance(one, str)))
    if known > n and not missing:
        notes.append("log-probs of tokens that were drawn with top-p, top-k or penalties")
    for bad in missing:
        if isinstance(bad, Divergence):
            return diverged("requery", bad, not_checked=tuple(notes), **more)
    for one in seen:
        if not (one.gap <= tolerance).all():  # also true if a gap is NaN
            return diverged("requery", _divergence(tape, one), not_checked=tuple(notes), **more)
    if missing:
        return unverifiable("requery", tape.id, notes[0], not_checked=tuple(notes[1:]), **more)
    if not n:
        why = "its log-probs can't be compared" if known else "it holds no log-prob"
        return unverifiable("requery", tape.id, f"{why}, so a model has nothing to score", **more)
    return verified("requery", tape.id, not_checked=tuple(notes), **more)


def _divergence(tape: Tape, one: Scored) -> Divergence:
    row, worst = one.row, int(np.argmax(np.nan_to_num(one.gap, nan=np.inf)))
    call = tape.call(row.calls[int(row.call[worst])])
    version, at = row.versions[int(row.version[worst])], int(row.offset[worst])
    old, now = float(row.old[worst]), float(one.logprob[worst])
    record = next((k for k, c in tape.log.call_order if c.call == call.call), None)
    return Divergence(
        tape=tape.id,
        turn=int(row.turn[worst]),
        record=record,
        call=call.call,
        by=call.by,
        field=f"logprobs[{at}]",
        recorded=old,
        observed=now,
        cause=Likely.WEIGHTS,
        sentence=f"call {call.call}, token {at}: the tape has log-prob {old:.4f}, sampled by version {version}; the "
        f"weights in {one.policy} give {now:.4f}, and differ by {one.gap.mean():.3g} nats in the mean",
    )
