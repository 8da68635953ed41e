"""The processes of a run. Rank 0 rolls out, records and decides, and every rank computes its share of each update.

Rank 0 runs the training loop and is the only rank that reads tapes. For an update it sends each rank its share of the
batch (`updates.py`), once. Every rank then makes the same update on its share, and rank 0 joins the results. A run of
one process does the same with a single share.

The other ranks wait for rank 0 in `Processes.follow`, which returns when rank 0 finishes and raises an error if rank 0
is lost. Rollouts may take longer than the time limit of a collective operation. So between two calls the other ranks
rest: they poll the group's store until rank 0 wakes them.

The ranks don't read their tapes from the run directory: to find and check its tapes, each would read the segments of
all tapes, more bytes than the rows of its share. An update may also begin before its tapes are durable.

If weights are sharded over the ranks, no rank holds the whole model. Rank 0 reads the weights one at a time, and each
is gathered from all ranks when it is read (`GatheredWeights`). For a digest, each rank hashes its own rows.
"""

from __future__ import annotations

import copy
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, distributed, nn
from transformers import PreTrainedModel

from ...agents.engines.embedded.pretrained import emptied, fill, quiet_transformers, weights_digest
from ...agents.engines.weights.weight_files import write_tensors
from ...tapes.errors import UsageError
from .checkpoint import (
    POLICY,
    TRAINER,
    BadCheckpoint,
    Checkpoint,
    ModelWeights,
    joined,
    read_parts,
    taken_apart,
    unlike_state,
    write_parts,
)
from .ranks import DataParallelRanks, RankLost, Ranks, ShardedRanks, Whole, shared_digest
from .trainer import Trainer
from .updates import Division, Share, StepResult, TrainerState, UpdateStats

T = TypeVar("T")
BEAT, POLL, SILENCE = 1.0, 0.1, 60.0
"""Seconds between two signs of life by rank 0, between two polls of a rank that rests, and without a sign of life until
such a rank raises RankLost."""
BEATS = "tapereel/beats"
"""Key of the signs of life in the group's store."""
MakeTrainer = Callable[[str, nn.Module, Ranks], Trainer]
"""Function that takes (phase, model to train, ranks) and returns a new trainer. It must do the same on every rank."""


@contextmanager
def launched(*, shard: bool = False, sequence_parallel: int = 1, timeout: float = 1800.0) -> Iterator[Ranks]:
    """Yield the ranks that `accelerate launch` or `torchrun` started, or a single rank without a launcher.

    If `shard` is True, each process holds only a part of each weight. Each `sequence_parallel` consecutive ranks
    compute the same rows together. If a collective operation takes longer than `timeout` seconds, RankLost is raised.
    Raises UsageError if `sequence_parallel` doesn't divide the number of ranks.
    """
    if (size := int(os.environ.get("WORLD_SIZE", "1"))) % sequence_parallel:
        raise UsageError(
            f"processes.sequence_parallel={sequence_parallel} doesn't divide the number of processes, which is {size}: "
            f"start the run with torchrun --nproc-per-node {-(-size // sequence_parallel) * sequence_parallel}, or set "
            "another degree"
        )
    if size < 2:
        yield Ranks()
        return
    ours = not distributed.is_initialized()
    if ours:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        distributed.init_process_group(backend, timeout=timedelta(seconds=timeout))
    try:
        kind = ShardedRanks if shard else DataParallelRanks
        yield kind(sequence_parallel=sequence_parallel, timeout=timedelta(seconds=timeout))
    finally:
        if ours:
            distributed.destroy_process_group()


class Processes(ModelWeights):
    """One process (rank) of the group that computes updates together. Rank 0 gives commands, and the others
    `follow`."""

    def __init__(
        self, ranks: Ranks, model: nn.Module, make_trainer: MakeTrainer, empty: nn.Module | None = None
    ) -> None:
        """`model` needs the right weights only on rank 0. If weights are sharded, they are distributed now, unless the
        model is sharded already. Then `empty` is a copy of it that has no weights (`emptied`). If weights aren't
        sharded, they are copied to the other ranks for each new trainer."""
        super().__init__(model)
        self.ranks = ranks
        self.make_trainer = make_trainer
        self.empty = emptied(model) if ranks.sharded and empty is None else empty
        ranks.shard(model)
        # Read after `shard`, which replaces the parameters. Ranks name a weight to each other by these keys.
        self._named = dict(model.state_dict(keep_vars=True))
        self.member: Trainer
        """This rank's own trainer. It doesn't exist before `enter`."""
        self._busy = False
        self._lock = threading.Lock()
        self._resting: str | None = None
        """The key in the store that wakes the other ranks, if they rest."""

    # On rank 0

    def weights(self, *, copied: bool = False) -> Mapping[str, Tensor]:
        """Return the current weights by name. Sharded weights are never copied: each is gathered when it is read, so
        read them before the next update. Only for rank 0."""
        return GatheredWeights(self) if self.ranks.sharded else super().weights(copied=copied)

    def digest(self, recorded: str | None = None) -> str:
        """Return the digest of the current weights. No weight is gathered, unless `recorded` is from an earlier
        version. Only for rank 0."""
        return self.on_all(Processes._digest, recorded=recorded) if self.shared else super().digest(recorded)

    def digest_in(self, checkpoint: Checkpoint, recorded: str | None = None) -> str:
        """Return the digest of the weights in a checkpoint, of which each rank reads its part. Only for rank 0."""
        if not (self.shared and checkpoint.shared):
            return super().digest_in(checkpoint, recorded)
        if broken := self.damage(checkpoint):
            raise BadCheckpoint(broken[0])
        found = self.on_all(Processes._digest_in, checkpoint=checkpoint, recorded=checkpoint.state["digest"])
        checkpoint.check(lambda _: found)
        if recorded in (None, found):
            return found
        return self.on_all(Processes._digest_in, checkpoint=checkpoint, recorded=recorded)

    def whole(self) -> nn.Module:
        """Return a copy of the model with the current weights. It is whole, and only on rank 0. Only for rank 0."""
        if self.empty is None:
            return super().whole()
        made = copy.deepcopy(self.empty)
        fill(made, self.weights(), next(self.model.parameters()).device)
        return made

    @property
    def shared(self) -> bool:
        return self.ranks.sharded

    def save(self, folder: Path) -> dict[str, object]:
        """Write each rank's part of the weights and of the trainer's state. Only for rank 0."""
        return self.on_all(Processes._save, folder=folder) if self.shared else super().save(folder)

    def save_pretrained(self, folder: Path, averaged: Mapping[str, Tensor] | None = None) -> None:
        """Write the model in Hugging Face format. Weights are gathered one at a time, unless transformers must convert
        them together. Only for rank 0."""
        model = self.empty
        if model is None:
            return super().save_pretrained(folder, averaged)
        weights = GatheredWeights(self, averaged=averaged is not None)
        if hasattr(model, "save_pretrained") and (hasattr(model, "peft_config") or _converts(model)):
            made = copy.deepcopy(model)
            fill(made, weights, next(self.model.parameters()).device)
            with quiet_transformers():
                cast("PreTrainedModel", made).save_pretrained(folder)
        elif isinstance(model, PreTrainedModel):
            model.config.dtype, model.config.architectures = model.dtype, [type(model).__name__]
            model.config.save_pretrained(folder)
            if model.can_generate() and model.generation_config is not None:
                model.generation_config.save_pretrained(folder)
            # The names that `save_pretrained` writes. With the output layer's name instead of the embeddings', vLLM
            # loads a tied model without embeddings.
            sources, like = model.all_tied_weights_keys, weights.like
            names = [name for name in like if name not in sources or like.get(sources[name]) is not like[name]]
            write_tensors(weights, folder / "model.safetensors", names)

    def read(self, checkpoint: Checkpoint) -> None:
        """Replace the weights with those in the checkpoint, of which each rank reads its part. Raises BadCheckpoint if
        they aren't those that were saved. Only for rank 0."""
        if not self.shared:
            return super().read(checkpoint)
        if broken := self.damage(checkpoint):
            raise BadCheckpoint(broken[0])
        if not checkpoint.shared:
            checkpoint.check(partial(weights_digest, checkpoint.stored()))
        self.on_all(Processes._read, checkpoint=checkpoint)
        checkpoint.check(self.digest)

    def damage(self, checkpoint: Checkpoint) -> list[str]:
        """Return a sentence for each damaged piece of a tensor. Each rank checks a share of the files. Only for rank
        0."""
        return self.on_all(Processes._damage, checkpoint=checkpoint) if self.shared else checkpoint.damage()

    def call(self, function: Callable[..., T], **arguments: object) -> T:
        """Return `function(model, **arguments)`, computed with whole weights on every rank. `function` must be at the
        top level of a module. Only for rank 0."""
        if not self.ranks.sharded:
            return super().call(function, **arguments)
        return self.on_all(Processes._call, function=function, arguments=arguments)

    def enter(self, phase: str) -> Trainer:
        """Begin `phase` with a new trainer on every rank, and return this rank's. Only for rank 0."""
        self.on_all(Processes._enter, phase=phase)
        return self.member

    def updates(self, batch: Division, *, epochs: int = 1, seed: int | None = None) -> list[UpdateStats]:
        """Make an update on all ranks (see `Trainer.train_on`), each on its share of `batch`. Return the statistics of
        each step, over all ranks. Only for rank 0."""
        version = self.member.version
        steps, found = self.on_all(Processes._updates, batch.shares, epochs=epochs, seed=seed, version=version)
        if len(batch.shares) == 1:
            return steps
        results, advantages = [of_share for of_share, _ in found], [advantage for _, advantage in found]
        return batch.joined(steps, results, advantages, self.member.recipe.imitation)

    def state(self) -> TrainerState:
        """Return the state of the trainer, whole (`Trainer.state_dict`). Only for rank 0."""
        return self.on_all(Processes._state) if self.shared else self.member.state_dict()

    def load(self, state: TrainerState) -> None:
        """Continue from a trainer's state, with rank 0's weights. Only for rank 0."""
        self.on_all(Processes._load, state=state)

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continue from the trainer's state in a checkpoint. Only for rank 0."""
        if self.shared:
            self.on_all(Processes._resume, checkpoint=checkpoint)
        else:
            self.load(cast(TrainerState, checkpoint.trainer_state()))

    def unlike(self, checkpoint: Checkpoint) -> list[tuple[str, str, str]]:
        """Return (place, saved, current) for each value in the checkpoint's state that isn't the current one bit for
        bit. Random numbers aren't compared. Raises BadCheckpoint if the state can't be read. Only for rank 0."""
        if not (self.shared and checkpoint.shared):
            return unlike_state(checkpoint.trainer_state(), self.state())
        rest = checkpoint.rest()  # read by rank 0 alone, so that no other rank ends if it can't be read
        return self.on_all(Processes._unlike, checkpoint=checkpoint, rest=rest)

    def compared(self, recorded: Mapping[str, str | None]) -> dict[str, str]:
        """Return name and digest of the reference and the teacher (see `Trainer.compared`). Only for rank 0."""
        if not any(recorded.values()):
            return self.member.compared(recorded)
        # A digest of an earlier version is compared by all ranks together.
        return self.on_all(Processes._compared, recorded=recorded)

    def on_all(self, command: Callable[..., T], shares: Sequence[object] | None = None, **arguments: object) -> T:
        """Run a method of this class on every rank and return this rank's result. All ranks get the `arguments`. If the
        method takes `shares`, one for each share of the rows, each rank gets only its own. Only for rank 0."""
        with self._lock:  # commands may come from several threads
            self._busy = True
            self._tell(command, arguments)
            found = self._run(command, arguments if shares is None else {**arguments, "shares": shares})
            self._busy = False
            return found

    def finish(self, result: object) -> None:
        """Make `follow` return `result` on the other ranks. Only for rank 0, after `leading`."""
        self._tell("end", result)

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Return a context in which an error on rank 0 stops the other ranks too. Only for rank 0.

        The error is broadcast to the other ranks, unless a command is running. In that case they wait in a collective
        operation of the command, and would read the message as its data. They raise RankLost when this process ends.
        """
        done = threading.Event()
        beats = threading.Thread(target=self._beat, args=(done,), daemon=True)
        beats.start()
        try:
            try:
                yield
            finally:
                done.set()
                beats.join()
        except BaseException as error:
            if not self._busy:
                self._tell("stop", f"{type(error).__name__}: {error}")
            raise

    def _tell(self, command: str | Callable[..., object], arguments: object) -> None:
        # A rank that rests doesn't listen to broadcasts, so it is woken through the store first.
        if self._resting:
            _store().set(self._resting, "")
            self._resting = None
        self.ranks.broadcast((command, arguments))

    def _beat(self, done: threading.Event) -> None:
        """Until `done`, give a sign of life once per BEAT. Between two commands, let the other ranks rest."""
        while self.ranks.size > 1 and not done.wait(BEAT):
            # Without the lock, a command could begin after the test of `_busy`, and two broadcasts would get mixed up.
            with self._lock:
                try:
                    _store().add(BEATS, 1)
                    if not self._resting and not self._busy:
                        key = secrets.token_hex(8)
                        self._tell("rest", key)
                        self._resting = key
                except (RankLost, distributed.DistError):
                    return  # the next command fails for the same reason

    # On the other ranks

    def follow(self) -> object:
        """Run the commands of rank 0 until it calls `finish`, and return the result that it passes. Raises RankLost if
        rank 0 fails or is gone."""
        while True:
            command, arguments = cast("tuple[Any, Any]", self.ranks.broadcast())
            if command == "end":
                return arguments
            if command == "stop":
                raise RankLost(f"rank {self.ranks.rank} of {self.ranks.size} stops because rank 0 failed: {arguments}")
            if command == "rest":
                self._rest(arguments)
            else:
                self._run(command, arguments)

    def _rest(self, key: str) -> None:
        """Return when rank 0 sets `key`. Raises RankLost if rank 0 gives no sign of life for SILENCE seconds."""
        store, beats, heard = _store(), -1, time.monotonic()
        with self.ranks.waiting("rank 0"):
            while not store.check([key]):
                last, beats = beats, store.add(BEATS, 0)
                if beats != last:
                    heard = time.monotonic()
                elif time.monotonic() - heard > SILENCE:
                    raise RankLost(
                        f"rank {self.ranks.rank} of {self.ranks.size} had no sign of life from rank 0 for "
                        f"{SILENCE:.0f} seconds: it ended, hangs, or can't be reached; continue the run with "
                        "`resume=True`"
                    )
                time.sleep(POLL)

    # On all ranks

    def _run(self, command: Callable[..., T], arguments: Mapping[str, Any]) -> T:
        with self.ranks.waiting(f"the other ranks to {command.__name__.strip('_')}"):
            return command(self, **arguments)

    def _enter(self, phase: str) -> None:
        self._fetch()
        self.member = self.make_trainer(phase, self.model, self.ranks)

    def _fetch(self) -> None:
        """Copy rank 0's weights into `model` on every rank, unless they are sharded."""
        self.ranks.copy(self.model)

    def _gather(self, name: str, averaged: bool) -> Tensor:
        own = self._named[name]
        if averaged:
            # A tied weight has several names, and the average has only one of them. So it is looked up by the tensor.
            of = {p: self.member.averaged[name] for name, p in self.member.parameters.items()}
            own = cast(Tensor, of.get(own, own))
        return Whole({name: own})[name].detach()

    def _digest(self, recorded: str | None) -> str:
        return shared_digest(self._named, recorded)

    def _digest_in(self, checkpoint: Checkpoint, recorded: str | None) -> str:
        return shared_digest(self._parts(checkpoint, POLICY, self._named), recorded)

    def _unlike(self, checkpoint: Checkpoint, rest: dict[str, object]) -> list[tuple[str, str, str]]:
        own = self.member.own_state()
        found = unlike_state(joined(rest, self._parts(checkpoint, TRAINER, taken_apart(own)[1])), own)
        every: list[Any] = [None] * self.ranks.size
        distributed.all_gather_object(every, found, group=self.ranks.group)
        return [different for each in every for different in each]

    def _parts(self, checkpoint: Checkpoint, folder: str, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Read this rank's parts of tensors, which are sharded as those in `like`."""
        empty = {name: torch.empty_like(tensor, requires_grad=False) for name, tensor in like.items()}
        return read_parts(checkpoint.path / folder, empty, self.ranks.group)

    def _compared(self, recorded: Mapping[str, str | None]) -> dict[str, str]:
        return self.member.compared(recorded)

    def _save(self, folder: Path) -> dict[str, object]:
        write_parts(folder / POLICY, self._named, self.ranks.group)
        if not hasattr(self, "member"):  # no phase has begun
            return {}
        rest, tensors = taken_apart(self.member.own_state())
        write_parts(folder / TRAINER, tensors, self.ranks.group)
        return cast("dict[str, object]", rest)

    def _damage(self, checkpoint: Checkpoint) -> list[str]:
        found = self.ranks.gather(checkpoint.damage(self.ranks.share, self.ranks.shares))
        return [sentence for own in found for sentence in own]

    def _read(self, checkpoint: Checkpoint) -> None:
        own = dict(self.model.state_dict())
        if checkpoint.shared:
            read_parts(checkpoint.path / POLICY, own, self.ranks.group)
            return
        with torch.no_grad():
            for name, tensor in self.ranks.part(checkpoint.stored(), own).items():
                own[name].copy_(tensor)

    def _resume(self, checkpoint: Checkpoint) -> None:
        if checkpoint.shared:
            self.member.fill_optimizers()
            tensors = taken_apart(self.member.own_state())[1]
            state = joined(checkpoint.rest(), read_parts(checkpoint.path / TRAINER, tensors, self.ranks.group))
        else:
            state = checkpoint.mapped("trainer.pt")
        self.member.load_state_dict(cast(TrainerState, state))

    def _call(self, function: Callable[..., T], arguments: Mapping[str, Any]) -> T:
        return self.ranks.run(self.model, partial(function, self.model, **arguments))

    def _updates(
        self, epochs: int, seed: int | None, version: str | None, shares: Sequence[Share] | None = None
    ) -> tuple[list[UpdateStats], list[tuple[list[StepResult], Tensor]]]:
        """Make an update on this rank's share. Return its statistics, and on rank 0 the results of all shares."""
        share = self.ranks.scatter(shares)
        self.member.version = version
        steps = list(self.member.train_on(share, epochs=epochs, seed=seed))
        return steps, self.ranks.gather((list(map(StepResult.of, steps)), steps[0].advantage))

    def _state(self) -> TrainerState:
        return self.member.state_dict()

    def _load(self, state: TrainerState) -> None:
        self._fetch()
        self.member.load_state_dict(state)


class GatheredWeights(Mapping[str, Tensor]):
    """The current weights of a sharded model, for rank 0. A weight is gathered from all ranks when it is read, and not
    kept."""

    def __init__(self, processes: Processes, *, averaged: bool = False) -> None:
        """With `averaged`, the running average replaces the weights that are trained."""
        self._processes, self._averaged = processes, averaged
        named = processes.model.state_dict(keep_vars=True)
        like = {p: torch.empty(p.shape, dtype=p.dtype, device="meta") for p in named.values()}
        self.like = {name: like[p] for name, p in named.items()}
        """Tensors on the meta device with the weights' shapes and dtypes. Tied weights are the same tensor."""

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.like:
            raise KeyError(name)
        return self._processes.on_all(Processes._gather, name=name, averaged=self._averaged)

    def __iter__(self) -> Iterator[str]:
        return iter(self.like)

    def __len__(self) -> int:
        return len(self.like)


def _store() -> Any:
    """Return the store that all processes of the group can reach."""
    return distributed.distributed_c10d._get_default_store()


def _converts(model: nn.Module) -> bool:
    """Whether the files of a transformers model have other tensors than the model in memory."""
    return bool(getattr(model, "_weight_conversions", None))
