"""The models that a recipe compares the policy with: the reference and the teacher. Both are frozen while they score.

The reference may be the policy at an earlier time. Then only its trainable weights are kept, and they replace the
policy's weights while the reference scores. This works in the same way for full weights, adapters and shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...agents.vision.vision import Vision
from ...tapes.places import keys
from ...tapes.store.disk import REAL, put_file, read_file
from ..data.rows import Row
from ..data.stream import BadBatch
from .ranks import Ranks, shared_digest


class OtherModel:
    """A model, such as a reference or a teacher, that scores the policy's tokens. It must have the same token ids."""

    vision: Vision | None = None
    """How `model` sees pictures. None if `model` reads only text, or if it is the policy itself."""

    def __init__(self, model: nn.Module, name: str = "another model", vision: Vision | None = None) -> None:
        self.model, self.name, self.vision = model.eval(), name, vision
        self.digest = shared_digest(self.weights())

    def __str__(self) -> str:
        return f"{self.name} sha256:{self.digest}"

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights of this model. They may be sharded."""
        return self.model.state_dict(keep_vars=True)

    def has(self, digest: str) -> bool:
        """Return whether the weights have this recorded digest. If an earlier version recorded it, it replaces
        `self.digest`, so that the run's records agree."""
        if digest != self.digest:
            self.digest = shared_digest(self.weights(), digest)
        return digest == self.digest

    def described(self, recorded: str | None) -> str:
        """Return name and digest. If they were `recorded` for the same weights, the digest is the recorded one."""
        if recorded is not None:
            self.has(recorded.rpartition("sha256:")[2])
        return str(self)

    def logprobs(self, rows: Sequence[Row], score: Callable[[nn.Module], Tensor]) -> Tensor:
        """Return this model's log-probs (T,) of the own tokens of `rows`. `score(model)` computes them with a given
        model."""
        return score(self.model)

    def end_update(self) -> None:
        """Called after each update of the policy, so that a model can follow the policy. A frozen model ignores it."""

    def state_dict(self) -> dict[str, object]:
        """Return the state that a checkpoint holds."""
        return {"digest": self.digest}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue from a `state_dict()`. Raises BadBatch if the state comes from another model."""
        if not self.has(cast(str, state["digest"])):
            raise BadBatch(
                f"the checkpoint was compared with weights of digest {state['digest']}, and here it is {self}: put the "
                "recorded model back"
            )


class ServedTeacher(OtherModel):
    """A teacher that an engine serves. The run records its log-probs, so each update asks the engine at most once."""

    def __init__(self, name: str, ask: Callable[[Sequence[Row]], NDArray[np.float32]]) -> None:
        """`ask` takes rows and returns the log-probs of their own tokens at temperature 1. It may block."""
        self.model, self.name, self.ask = nn.Module(), name, ask
        self.digest = ""
        """Digest of the log-probs that `said` returned last."""

    def has(self, digest: str) -> bool:
        return digest == self.digest

    def logprobs(self, rows: Sequence[Row], score: Callable[[nn.Module], Tensor]) -> Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *(_known(row.teacher) for row in rows)]))

    def said(
        self, rows: Sequence[Row], folder: Path, *, ask: bool, check: Callable[[], object] = lambda: None
    ) -> tuple[list[Row], Path]:
        """Return the rows with the teacher's log-probs, and the file in `folder` that records these log-probs.

        The file's name is a digest of the rows' tokens and pictures. If the file is missing, the teacher is asked and
        the file is written. With `ask=False`, a missing file raises OSError. `check` is called before the file is
        written, as in `put_file`.
        """
        tokens = hashlib.sha256()
        for row in rows:
            # The same ids with a different picture are a different question.
            pictures = [keys(row.input_ids, row.places)] if row.places else []
            tokens.update(b"".join(part.tobytes() for part in (row.input_ids, row.own, *pictures)))
        path = folder / f"{tokens.hexdigest()[:32]}.f32"
        if ask and not path.exists():
            folder.mkdir(exist_ok=True)
            put_file(REAL, path, self.ask(rows).tobytes(), check=check)
        data = read_file(path)
        self.digest = hashlib.sha256(data).hexdigest()
        cuts = np.cumsum([0, *(len(row.own) for row in rows)])
        values = np.frombuffer(data, np.float32)
        given = [replace(row, teacher=values[cuts[k] : cuts[k + 1]]) for k, row in enumerate(rows)]
        return given, path

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Do nothing. The log-probs are recorded in the run, so a checkpoint holds no state."""


class EarlierWeights(OtherModel):
    """The policy with earlier weights, or with a moving average of its weights, for example as the reference."""

    def __init__(
        self,
        model: nn.Module,
        name: str,
        weights: Mapping[str, Tensor] | None = None,
        *,
        every: int | None = None,
        decay: float = 0.0,
        ranks: Ranks | None = None,
    ) -> None:
        """`weights` are the earlier weights as whole tensors by name. If None, the current weights of `model` are
        copied.

        Every `every` updates, the earlier weights become decay * weights + (1 - decay) * policy. If `every` is None,
        they never change.
        """
        self.ranks = ranks or Ranks()
        self.ranks.shard(model)  # this replaces the parameters, so they are read afterwards
        self.model, self.name, self.every, self.decay = model, name, every, decay
        self._policy = trainable(model)
        self._weights = {key: p.detach().clone() for key, p in self._policy.items()}
        self.load_state_dict({"weights": self._weights if weights is None else weights, "updates": 0})

    def weights(self) -> Mapping[str, Tensor]:
        return self._weights

    def logprobs(self, rows: Sequence[Row], score: Callable[[nn.Module], Tensor]) -> Tensor:
        self._exchange()
        try:
            return score(self.model)
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        # The weights are exchanged in place, because an optimiser and FSDP hold these tensors. They are exchanged one
        # by one, because a copy of all of them would need as much memory again.
        for key, p in self._policy.items():
            held = p.detach().clone()
            p.copy_(self._weights[key])
            self._weights[key].copy_(held)

    @torch.no_grad()
    def end_update(self) -> None:
        self.updates += 1
        if self.every is not None and self.updates % self.every == 0:
            for key, p in self._policy.items():
                self._weights[key].lerp_(p, 1 - self.decay)
            self.digest = shared_digest(self._weights)

    def state_dict(self) -> dict[str, object]:
        return {"weights": dict(self._weights), "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        weights = dict(cast("Mapping[str, Tensor]", state["weights"]))
        for key, tensor in self.ranks.part(weights, self._weights).items():
            self._weights[key].copy_(tensor)
        self.updates = cast(int, state["updates"])
        self.digest = shared_digest(self._weights)


def _known(column: NDArray[np.float32] | None) -> NDArray[np.float32]:
    if column is None:
        raise BadBatch("a row lacks the log-probs of the teacher behind an engine: `History.taught_rows` adds them")
    return column


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights that updates change, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
