"""Makes a policy's trainers, one for each phase, and loads the models that the policy is compared with.

The trainers depend only on the settings, so every process makes the same ones.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ...agents.engines.embedded.pretrained import Pretrained, load_pretrained, load_tokenizer, placed
from ...agents.engines.engine import CapableEngine, EngineError
from ...agents.rendering.renderer import Renderer
from ...agents.setup.engine_config import CustomConfig, ServerConfig, connect_to
from ...agents.vision.vision import Vision
from ...tapes.common.run_async import run_async
from ...tapes.common.text import logger
from ...tapes.errors import UsageError
from ..data.rows import Row
from ..data.stream import BadBatch
from ..loop.loop_config import NO_WARM_START, OWN, CriticConfig, LoopConfig, ReferenceConfig, WarmStartConfig
from ..objective.recipe import Recipe
from ..recipes import get_recipe
from ..trainer.critic import Critic, CriticTrainer, Value
from ..trainer.ranks import Ranks, Whole, shared_digest
from ..trainer.reference import EarlierWeights, OtherModel, ServedTeacher, trainable
from ..trainer.trainer import Trainer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


log = logger("train")


@dataclass(kw_only=True)
class TrainerFactory:
    """Makes the trainers of a policy."""

    model: nn.Module
    """The policy's model. It must have the base weights when the factory is made. Updates change it in place."""
    renderer: Renderer
    tokenizer: PreTrainedTokenizerFast
    loop: LoopConfig
    recipe: Recipe
    """The recipe for the loop's updates."""
    warm: WarmStartConfig = NO_WARM_START
    ranks: Ranks = field(default_factory=Ranks)
    """The processes that may share the policy's weights."""
    empty: nn.Module | None = None
    """A copy of the model without weights (`emptied`), if the processes share its weights."""
    offload: bool = False
    """Whether the optimiser's state is kept in main memory."""

    def __post_init__(self) -> None:
        # The models that the policy is compared against are loaded here, before anything is written.
        loop, recipe = self.loop, self.recipe
        if loop.critic is not None and not recipe.needs_value:
            raise UsageError(
                f"recipe {recipe.name!r} takes no values, so loop.critic would do nothing: remove it, or choose "
                "a recipe with credit 'gae', as `ppo`"
            )
        self._recipes = {"sft": get_recipe("sft"), "rl": recipe}
        start = "warm" if self.warm.updates else "base"
        self._how = how = loop.reference or ReferenceConfig(model=start)
        _check_compared(loop, recipe, how, start)
        named = {"reference": how.model if recipe.needs_reference else None, "teacher": loop.teacher}
        self._others: dict[str, OtherModel] = {}
        for setting, name in named.items():
            if isinstance(name, str) and (setting == "teacher" or name not in OWN):
                self._others[setting] = self._beside(name, f"loop.{setting}")
            elif name is not None and not isinstance(name, str):
                self._others[setting] = _served(self.tokenizer, name)
                sampling = loop.sampling
                if recipe.score.temperature == "recorded" and {sampling.temperature, sampling.first_temperature} - {
                    1.0,
                    None,
                }:
                    raise UsageError(
                        f"a teacher behind an engine scores at temperature 1, but recipe {recipe.name!r} uses the "
                        "temperature of loop.sampling: set loop.sampling.temperature=1, or loop.teacher to a model's "
                        "folder"
                    )
        for setting, other in self._others.items() if start == "base" else ():
            alone = setting == "teacher" or recipe.stands_still(own_reference=True)
            if alone and other.digest == _plain_digest(self.model):
                raise UsageError(
                    f"loop.{setting}={other.name} has the same weights as the model that is trained, so nothing would "
                    "be learned from it: name another model"
                )
        held = trainable(self.model) if named["reference"] == "base" else {}
        self._base = {name: p.detach().clone() for name, p in held.items()} or None

    @property
    def vision(self) -> Vision | None:
        """How the model reads pictures, or None if it reads only text."""
        pictures = self.renderer.pictures
        return pictures if isinstance(pictures, Vision) else None

    def make(self, phase: str, work: nn.Module, ranks: Ranks) -> Trainer:
        """Return a new trainer for `phase`, which begins with the current weights of the model `work`."""
        recipe = self._recipes[phase]
        optimiser = self.warm.optimiser if phase == "sft" else self.loop.optimiser
        return Trainer(
            work,
            recipe,
            optimiser,
            reference=self._reference(work, ranks) if recipe.needs_reference else None,
            teacher=self._others["teacher"] if recipe.needs_teacher else None,
            critic=self._critic(work, ranks) if recipe.needs_value else None,
            ranks=ranks,
            vision=self.vision,
            offload=self.offload,
        )

    def _reference(self, work: nn.Module, ranks: Ranks) -> OtherModel:
        """Make the reference for a new phase. A resumed run makes it too, and then loads the recorded weights into
        it."""
        how = self._how
        return self._others.get("reference") or EarlierWeights(
            work, how.model, self._base, every=how.every, decay=how.decay, ranks=ranks
        )

    @property
    def _critic_config(self) -> CriticConfig:
        return self.loop.critic or CriticConfig()

    def _critic(self, work: nn.Module, ranks: Ranks) -> CriticTrainer:
        """Make a new critic from the policy's current weights. A resumed run makes it too, and then loads its state."""
        config = self._critic_config
        if config.body == "own" and self.empty is not None:
            critic = Critic.of(self.empty, normalised=config.normalised, vision=self.vision)
            self.ranks.shard(critic, critic.weights_of(work), next(work.parameters()).device)
        else:
            make, model = (Critic.of, self.model) if config.body == "own" else (Critic.on, work)
            critic = make(model, normalised=config.normalised, vision=self.vision)
        return CriticTrainer(
            critic,
            config.optimiser,
            loss=Value(clip=config.clip),
            passes=config.passes,
            first=config.first,
            balance=self.recipe.balance,
            ranks=ranks,
            offload=self.offload,
        )

    def _beside(self, name: str, setting: str) -> OtherModel:
        """Load the model `name`, a folder or a name on the hub, on the policy's device and in the policy's dtype. The
        ranks may share its weights. Raises UsageError if its tokenizer differs from the policy's."""
        weights = next(self.model.parameters())
        base: Any = getattr(self.model, "get_base_model", lambda: self.model)()
        dtype: Any = str(base.dtype).removeprefix("torch.")
        video = "native" if self.vision is not None and self.vision.video_marker is not None else "frames"
        found = load_pretrained(
            name, dtype=dtype, attention=base.config._attn_implementation, video=video, empty=self.ranks.sharded
        )
        _check_tokens(self.tokenizer, found.tokenizer, f"{setting}={name}")
        return OtherModel(shared(found.model, found, name, weights.device, self.ranks), name, found.vision)


def shared(model: nn.Module, found: Pretrained, folder: str, device: torch.device, ranks: Ranks) -> nn.Module:
    """Return the model of `found`, with or without adapters, on `device`. If the ranks share weights, it has this
    rank's part of each."""
    if found.weights is None:
        model = placed(model, device)
        if ranks.sharded and not ranks.rank:
            log.warning(
                f"each rank loads the whole model {folder} before it keeps its part: it has adapters or reads "
                "pictures, or its files name the weights differently"
            )
    ranks.shard(model, found.weights, device)
    return model


def _check_compared(loop: LoopConfig, recipe: Recipe, how: ReferenceConfig, start: str) -> None:
    """Check the models that the recipe compares the policy with. Raises UsageError if no setting names a reference or a
    teacher that it needs, if a setting names one that it doesn't use, or if the policy would only be compared with
    itself. `start` names the weights that the loop begins with: `warm` or `base`."""
    reference = None if how.model == "none" else how.model
    # `base` is allowed without an error, because some configurations name it although their recipe needs no reference.
    unread = loop.reference is not None and (reference not in (None, "base") or how.every is not None)
    for setting, needs, name, chosen in (
        ("reference", recipe.needs_reference, reference, unread),
        ("teacher", recipe.needs_teacher, loop.teacher, loop.teacher is not None),
    ):
        if needs and name is None:
            raise UsageError(
                f"recipe {recipe.name!r} compares the policy with a {setting}, and loop.{setting} names none: name a "
                "model with the same tokenizer, or set the KL coefficient (beta) to 0"
            )
        if chosen and not needs:
            raise UsageError(
                f"recipe {recipe.name!r} reads no {setting}, so loop.{setting}={name} would do nothing: remove it, or "
                f"add a regulariser {{kind: kl, to: {setting}, beta: ...}}"
            )
    if how.model == "warm" != start:
        raise UsageError("loop.reference=warm is the model after the warm start, and there is none: set it to base")
    if recipe.stands_still(own_reference=how.model == start):
        raise UsageError(
            f"recipe {recipe.name!r} compares the policy with itself alone, so its gradient is always 0: set "
            "loop.reference to another model, or the KL's `to` to teacher, with loop.teacher"
        )


def _served(own: PreTrainedTokenizerFast, config: ServerConfig | CustomConfig) -> ServedTeacher:
    """Return a teacher whose log-probs come from the engine in `config`. The engine is made and closed for each batch.
    Raises UsageError if its tokenizer differs from the policy's."""
    if isinstance(config, ServerConfig) and not config.urls:
        raise UsageError("loop.teacher.urls is empty: start the teacher's server (`tapereel serve model`) and name it")
    if config.kind == "sglang":
        raise UsageError("loop.teacher.kind is sglang, which scores no given tokens: serve the teacher by vLLM")
    if config.model is not None:
        _check_tokens(own, load_tokenizer(config.model), f"loop.teacher.model={config.model}")

    async def score(rows: Sequence[Row]) -> list[array[float]]:
        made = await connect_to(config) if isinstance(config, ServerConfig) else config.make(("score",), "A teacher")
        engine = cast(CapableEngine, made)
        try:
            if (shown := [row for row in rows if row.places]) and "pictures" not in engine.can:
                raise BadBatch(
                    f"tape {shown[0].tape} shows the picture {shown[0].places[0].media[0]}, and the teacher behind "
                    f"{config.kind}:{config.model} can't see: set loop.teacher to vLLM with --enable-scale-out that "
                    "serves a model that sees, or to the folder of one"
                )
            # The arguments for pictures are passed only if needed, because a text-only engine doesn't accept them.
            more: list[Any] = [{"places": row.places, "picture": row.file} if row.places else {} for row in rows]
            asked = [engine.score(row.input_ids.tolist(), **own) for row, own in zip(rows, more, strict=True)]
            found = await asyncio.gather(*asked)
        finally:
            await engine.close()
        for row, values in zip(rows, found, strict=True):
            if len(values) != len(row) - 1 or not np.isfinite(values).all():
                raise EngineError(
                    f"{config.kind} scored {len(row)} tokens of tape {row.tape} with {len(values)} log-probs, or one "
                    "isn't finite: `score` gives one for each token but the first"
                )
        return found

    def ask(rows: Sequence[Row]) -> NDArray[np.float32]:
        found = zip(rows, run_async(score(rows)), strict=True)
        return np.concatenate([np.asarray(values, np.float32)[row.own - 1] for row, values in found])

    return ServedTeacher(f"{config.kind}:{config.model}", ask)


def _check_tokens(own: PreTrainedTokenizerFast, tokenizer: PreTrainedTokenizerFast, named: str) -> None:
    """Raise UsageError if a token has a different id in the policy's tokenizer."""
    ours, theirs = own.get_vocab(), tokenizer.get_vocab()
    if ours != theirs:
        token = next((token for token in {**ours, **theirs} if ours.get(token) != theirs.get(token)), "")
        raise UsageError(
            f"{named} has another tokenizer than the model that is trained ({own.name_or_path}): "
            f"token {token!r} is {theirs.get(token)} there and {ours.get(token)} here, so its log-probs would be of "
            "other text. Name a model with the same tokenizer"
        )


def _plain_digest(model: nn.Module) -> str:
    """Return the digest of the weights, leaving out new adapters, which don't change the model's output yet. It equals
    the digest of the model before the adapters were added."""
    base: Any = getattr(model, "get_base_model", lambda: model)()
    state = Whole(base.state_dict())
    return shared_digest(
        {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in base.state_dict().items()
            if ".lora_A." not in name and not (".lora_B." in name and not state[name].any())
        }
    )
