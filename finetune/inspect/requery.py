"""Requery: scores recorded tokens with a model again, and compares the log-probs with those on tape.

This checks that a tape's tokens come from the policy that the tape names. Each token is scored (teacher-forced) with
the weights of its recorded version, or with weights that the caller names. The weights come from checkpoints and model
folders. If the weights of a version are missing, its tokens can't be verified.

In float32, log-probs are equal up to `TOLERANCE`. In bfloat16, the tolerance is measured (`loop/rounding.py`), and the
root mean square over a tape and over a version's tapes is compared.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ...agents.engines.embedded.pretrained import (
    Dtype,
    Pretrained,
    earlier_digest,
    load_pretrained,
    load_weights,
    weights_digest,
)
from ...agents.setup.recorded_setup import recorded_rendering, with_trainer_settings
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
from ..loop.rounding import TOLERANCE, allowed, rms
from ..trainer.checkpoint import Checkpoint, checkpoint_folders, checkpoints
from ..trainer.logprobs import casting, parts, score

Precision = Literal["float32", "bfloat16 weights", "bfloat16 autocast", "bfloat16 assumed"]
"""How a sampler computed: in float32, in the dtype of its weights, or under autocast to bfloat16. If the run doesn't
record it, as with servers, bfloat16 is assumed where float32 doesn't give the recorded log-probs."""
UNKNOWN = "the run doesn't record the precision of its engine, and bfloat16 explains the differences from float32"
Begun = Sequence[tuple[str, Dtype]]
"""The model folders that a run began with, and the dtypes of their weights."""
BATCH = 128
"""Number of tapes that are scored and judged in one call of `requery`."""


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

    def __init__(self, run: Path, published: Sequence[Publish], *, only: str | None = None, begun: Begun = ()) -> None:
        """`only` is a checkpoint or model folder that scores all tokens, whichever version the tapes name."""
        self.run = run
        self.digests = {publish.version: publish.digest for publish in published}
        self._video: VideoTokens = recorded_rendering(run).video
        self._settings = recorded_settings(run)
        dtype: Dtype = begun[0][1] if begun else "float32"
        self.only = _folder(Path(only), self._video, dtype) if only is not None else None
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
            for name, dtype in self._begun:
                if (begun := local_folder(name)) is not None:
                    found.append(_folder(begun, self._video, dtype))
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

    def precision(self, version: str) -> Precision:
        """Return the precision in which a version was sampled."""
        lineage = version.rpartition(":")[0]
        if lineage and self.digests.get(version, "").startswith(lineage):
            return "bfloat16 weights"  # an embedded engine that nothing trains names its weights by their digest
        own = (self._settings.get("players") or {}).get(lineage.partition("-")[2], self._settings)
        if (own.get("engine") or {}).get("kind") != "embedded":
            return "bfloat16 assumed"
        optimiser = own.get("optimiser") or (self._settings.get("loop") or {}).get("optimiser") or {}
        return "bfloat16 autocast" if optimiser.get("autocast") else "bfloat16 weights"

    def logprobs(
        self, policy: Policy, rows: Sequence[Row], precision: Precision, model: nn.Module | None = None
    ) -> NDArray[np.float64]:
        """Return the log-probs (T,) of the tokens that agents produced in `rows`, under these weights or `model`."""
        found = self.loaded(policy)
        model = found.model if model is None else model
        with casting(model, torch.bfloat16 if precision == "bfloat16 autocast" else None):
            return score(model, rows, vision=found.vision).logprob.double().cpu().numpy()

    def scored(self, policy: Policy, version: str, rows: Sequence[Row], tolerance: float | None) -> list[Scored]:
        """Score the tokens of `rows`, which `version` sampled, with these weights and in the sampler's precision. If
        `tolerance` is None, it is measured for a precision other than float32."""
        narrow, precision = torch.bfloat16, self.precision(version)
        recorded = np.concatenate([row.old for row in rows]).astype(np.float64)
        now = self.logprobs(policy, rows, precision)
        model: Any = self.loaded(policy).model
        wide = precision != "bfloat16 autocast" and all(weight.dtype != narrow for weight in model.parameters())
        known = precision == "bfloat16 weights" or tolerance is not None
        if wide and (known or (np.abs(now - recorded) <= TOLERANCE).all()):
            precision = "float32"
        exact = None
        if precision != "float32" and tolerance is None:
            # The weights that the sampler rounds are rounded for float32 too, so that only activations differ.
            model = deepcopy(model)
            if precision == "bfloat16 autocast":
                for layer in parts(model)[0].modules():
                    if isinstance(layer, nn.Linear):
                        layer.to(narrow)
            elif precision == "bfloat16 assumed":
                for weight in filter(torch.is_floating_point, model.parameters()):
                    weight.data = weight.data.to(narrow)
                now = self.logprobs(policy, rows, precision, model)
            exact = self.logprobs(policy, rows, "float32", model.float())
        ends = np.cumsum([len(row.own) for row in rows])
        places = [slice(end - len(row.own), end) for row, end in zip(rows, ends, strict=True)]
        if exact is None:
            limit = TOLERANCE if tolerance is None else tolerance
            found = [(Compared("token", float(np.abs(now - recorded)[at].max()), limit),) for at in places]
        else:
            found = compared(recorded - exact, now - exact, places)
        return [
            Scored(row, now[at], policy.name, precision, one) for row, at, one in zip(rows, places, found, strict=True)
        ]


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


def _folder(path: Path, video: VideoTokens, dtype: Dtype) -> Policy:
    """Return the weights in the directory of a checkpoint, or of a model in Hugging Face format, in `dtype`."""
    if (path / "state.json").is_file():
        return _checkpoint(next(one for one in checkpoints(path.parent) if one.path == path), video)
    found = load_pretrained(path, device="auto", dtype=dtype, video=video)
    return Policy(str(path), weights_digest(found.model.state_dict()), lambda: found)


@dataclass(frozen=True)
class Scored:
    """The tokens of a row that one version of a policy sampled, and their log-probs under the weights of this
    version."""

    row: Row
    logprob: NDArray[np.float64]
    """Log-probs (n,) of the row's own tokens, in the sampler's precision."""
    policy: str
    precision: Precision
    compared: tuple[Compared, ...]
    """The differences that decide the verdict."""

    @property
    def gap(self) -> NDArray[np.float64]:
        """|log-prob - recorded log-prob| (n,) in nats, NaN for a token whose log-prob is NaN under the weights."""
        return np.abs(self.logprob - self.row.old.astype(np.float64))


class Compared(NamedTuple):
    """A difference that decides a verdict."""

    of: str
    """`token` if it is the largest difference of a token. `tape` or `version` if it is the root mean square error of
    their recorded log-probs against float32 arithmetic."""
    error: float
    limit: float
    rounding: float | None = None
    """The root mean square error of the version's log-probs that were computed again."""


def compared(
    recorded: NDArray[np.float64], now: NDArray[np.float64], tapes: Sequence[slice]
) -> list[tuple[Compared, ...]]:
    """Compare errors (N,) of the recorded log-probs of a version with those computed again, for each of its tapes and
    for the version. Tapes that are off by themselves don't count for the version."""
    rounding = rms(now)
    own = [Compared("tape", rms(recorded[at]), allowed(at.stop - at.start, now), rounding) for at in tapes]
    others = [recorded[at] for at, one in zip(tapes, own, strict=True) if one.error <= one.limit]
    every = np.concatenate(others or [recorded])
    version = Compared("version", rms(every), allowed(len(every), now), rounding)
    return [(one, version) for one in own]


def requery_run(
    run: str | Path,
    model: str | None = None,
    *,
    tolerance: float | None = None,
    threads: int = 1,
    tapes: Sequence[str] = (),
    split: str | None = None,
    progress: Progress = silent,
) -> tuple[Verdicts, str | None]:
    """Check `tapes`, or by default all closed tapes in `split` that have sampled tokens.

    Return (verdicts, reason). The reason is None, or explains why there are no verdicts.

    `model` is a checkpoint or model folder that scores every token. With None, each token is scored with the version
    that sampled it, from the run's checkpoints and model folders. `tolerance` is the largest difference in nats that
    counts as equal. With None, it is `TOLERANCE` in float32, and measured in bfloat16. `threads` is the number of torch
    threads.
    """
    if (tolerance or 0) < 0 or threads < 1:
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


def _begun(run: str | Path) -> Begun:
    settings = recorded_settings(run)
    policies = (settings, *(settings.get("players") or {}).values())
    engines: list[Any] = [with_trainer_settings(one.get("engine") or {}, one.get("trainer") or {}) for one in policies]
    return [(one["model"], one.get("dtype", "float32")) for one in engines if isinstance(one.get("model"), str)]


def requery(tapes: Sequence[Tape], policies: Policies, *, tolerance: float | None = None) -> list[Verdict]:
    """Return the verdict on each tape. The tapes share forward passes, and a measured tolerance."""
    made = [rows(tape) if any(call.completion is not None for call in tape.calls) else [] for tape in tapes]
    batches: dict[str, tuple[Policy, list[tuple[int, Row]]]] = {}
    missing: dict[int, list[str | Divergence]] = defaultdict(list)
    fitting = set[int]()
    for t, found in enumerate(made):
        for version, own in (part for row in found for part in _by_version(tapes[t], row)):
            policy = policies.of(version)
            if isinstance(policy, str):
                missing[t].append(policy)
            else:
                batches.setdefault(version, (policy, []))[1].append((t, own))
    seen: list[list[Scored]] = [[] for _ in tapes]
    for version, (policy, batch) in batches.items():
        kept = list[tuple[int, Row]]()
        for t, row in batch:
            if (obstacle := _obstacle(tapes[t], row, policies.loaded(policy), fitting)) is None:
                kept.append((t, row))
            else:
                missing[t].append(obstacle)
        if not kept:
            continue
        scored = policies.scored(policy, version, [row for _, row in kept], tolerance)
        for (t, _), one in zip(kept, scored, strict=True):
            seen[t].append(one)
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


def _verdict(
    tape: Tape, seen: Sequence[Scored], missing: Sequence[str | Divergence], tolerance: float | None
) -> Verdict:
    n = sum(len(one.row.own) for one in seen)
    known = sum(int(np.isfinite(np.asarray(call.logprobs or ())).sum()) for call in tape.calls)
    more: dict[str, Any] = {"checked": {"tokens": n}}
    pairs = [(one, found) for one in seen for found in one.compared]
    if n:
        every = np.concatenate([one.gap for one in seen])
        more["precision"] = ", ".join(sorted({one.precision for one in seen}))
        more["measured"] = {"largest": float(every.max()), "mean": float(every.mean()), "tolerance": pairs[0][1].limit}
    for _, found in pairs:
        if found.rounding is not None:
            more["measured"] |= {f"{found.of}_error": found.error, f"{found.of}_tolerance": found.limit}
            more["measured"]["rounding"] = found.rounding
    missing = [*missing, *(UNKNOWN for one in seen if one.precision == "bfloat16 assumed" and tolerance is None)]
    notes = list(dict.fromkeys(one for one in missing if isinstance(one, str)))
    if known > n and not missing:
        notes.append("log-probs of tokens that were drawn with top-p, top-k or penalties")
    for bad in missing:
        if isinstance(bad, Divergence):
            return diverged("requery", bad, not_checked=tuple(notes), **more)
    for one, found in pairs:
        if not found.error <= found.limit:  # also true if a log-prob is NaN
            why = f"the {found.of} is off by {found.error:.3g} nats, and {one.precision} explains {found.limit:.3g}"
            return diverged("requery", _divergence(tape, one, why), not_checked=tuple(notes), **more)
    if missing:
        return unverifiable("requery", tape.id, notes[0], not_checked=tuple(notes[1:]), **more)
    if not n:
        why = "its log-probs can't be compared" if known else "it holds no log-prob"
        return unverifiable("requery", tape.id, f"{why}, so a model has nothing to score", **more)
    return verified("requery", tape.id, not_checked=tuple(notes), **more)


def _divergence(tape: Tape, one: Scored, why: str) -> Divergence:
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
        f"weights in {one.policy} give {now:.4f}, and differ by {one.gap.mean():.3g} nats in the mean; {why}",
    )
