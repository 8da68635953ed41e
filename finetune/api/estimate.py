"""Estimates a training run's memory, disk and tokens from its settings and the model's `config.json`, without torch.

The results leave out players, CUDA itself (about 0.5 GiB) and fragmentation in torch's allocator.
"""

from __future__ import annotations

import os
import shutil
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import cast

from ...agents.setup.engine_config import EmbeddedConfig
from ...agents.setup.profiles import TINY, shape_of
from ...tapes.common.config import load_config
from ...tapes.common.text import logger
from ...tapes.store.run_directory import CONFIG, METRICS, read_metrics
from ..loop.loop_config import OWN, SECOND
from ..run.player_config import adapters_of
from ..run.train_config import TrainConfig

log = logger("train")
PROMPT = 256
"""Tokens of a prompt that `say_needs` assumes, since no prompt is known before a run begins."""
LIBRARIES = 0.4e9
"""Bytes that Python needs with torch and transformers."""
AHEAD = ("gspo", "minor_sft")
"""The recipes whose loss of a token depends on other tokens (`Recipe.local` is false)."""
ROOM = 0.8
"""Share of the free memory that a run without gradient checkpointing may need by its estimate."""
WIDE, NARROW = 4, 2
"""Bytes per number in float32 and bfloat16. Trained weights, their gradients and optimiser states are float32."""
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes per number in 4 bits: a scale of 8 bits for 64 numbers, and one of 32 bits for 256 scales."""
SAVED = {
    (False, False, WIDE): (24, 16, 16, 16),
    (False, True, WIDE): (26, 10, 10, 8),
    (True, False, WIDE): (16, 12, 12, 16),
    (True, False, NARROW): (28, 12, 8, 10),
}
"""Bytes that autograd saves for each token in one layer of Qwen3, by (LoRA, autocast, bytes per weight). The four
numbers are per unit of width, queries, keys and feed-forward (Korthikanti et al., 2022). Llama needs a tenth less."""


def estimate(config: TrainConfig, ranks: int = 1, prompt: int | None = None) -> dict[str, dict[str, float]] | None:
    """Estimate the memory and tokens that a run by this many processes needs. Return None if the shape of the model is
    unknown. The results are upper bounds for any prompts, or what is needed if prompts have `prompt` tokens.

    `GiB` has the memory of each item on the device of rank 0 and the `sum` of the items, at the moment with the largest
    sum. Other ranks need the same, or less if the engine is embedded. `GiB of main memory` has what `trainer.offload`
    keeps there, and `GiB of disk` a checkpoint and the run directory. `tokens` has the maximum number of sampled tokens
    in an episode, in an update, and in the run with its evaluations. The profile of `config` must have been applied to
    it.
    """
    shape = shape_of(config.engine.model)
    if shape is None:
        return None
    parts = ranks if config.processes.shard else 1
    loop, settings, evaluation = config.loop, config.engine, config.evaluation
    lora = adapters_of(settings, config.trainer)
    own, output = NARROW if config.trainer.dtype == "bfloat16" else WIDE, shape.vocabulary * shape.width
    capacity = settings.capacity or 4096  # the default of the embedded engine
    episode = loop.longest_episode(capacity) or capacity
    longest = capacity if prompt is None else min(capacity, prompt + episode)
    rows = 2 * (2 * shape.width + shape.queries + shape.keys) + 3 * (shape.width + shape.feed)
    still = 0 if config.trainer.freeze == "nothing" else shape.tower
    trained = shape.parameters - still if lora is None else shape.layers * lora.rank * rows
    model = shape.parameters * own + (0 if lora is None else trained * WIDE)
    quantised = lora is not None and lora.quantise is not None
    if quantised:
        linear = shape.layers * (2 * shape.width * (shape.queries + shape.keys) + 3 * shape.width * shape.feed)
        model -= round(min(linear, shape.body - shape.tower) * (own - NF4))
    # With `offload`, a device holds the two moments of one weight at a time.
    offload = config.trainer.offload and config.trainer.device != "cpu"
    moments = 2 * trained * WIDE
    cache = settings.slots * longest * 2 * shape.layers * shape.keys * own
    engine = {
        "weights of the engine": model,
        # Between turns, keys and values are kept outside the slots. They take at most as much memory again.
        "KV cache of the engine": cache * (1 if loop.limits.turns == 1 else 2),
        "logits of the engine": settings.slots * shape.vocabulary * 28,  # in float32, and three times in float64
    }
    embedded, measures = isinstance(settings, EmbeddedConfig), evaluation.tasks is not None or evaluation.fraction > 0
    apart = measures and (evaluation.engine or ("own" if embedded else "loop")) == "own"
    second, body = SECOND.get(loop.recipe, ()), loop.critic is None or loop.critic.body == "own"
    valued, learnt = "critic" in second and body, (shape.body + output - still) * WIDE
    changed = [loop.changes.get(name) for name in ("regulariser", "shape")]
    # `changes` is checked later together with the recipe, which needs torch. That check refuses values that aren't
    # terms, so they are skipped here.
    terms = [term for part in changed if isinstance(part, list) for term in part if isinstance(term, dict)]
    kls = [term for term in terms if "kl" in str(term.get("kind")) and term.get("to") in (None, "reference")]
    reads = "reference" in second or bool(kls)
    apart_from = loop.reference.model if loop.reference is not None and loop.reference.model not in OWN else None
    reference, teacher = (shape_of(name) if isinstance(name, str) else None for name in (apart_from, loop.teacher))
    fixed = {
        "weights": model // parts,
        "optimiser": (
            (2 * min(trained, output) * WIDE if offload else moments) + (trained * WIDE if loop.optimiser.ema else 0)
        )
        // parts,
        "reference": (reference.parameters * own if reference is not None else trained * WIDE) // parts if reads else 0,
        "teacher": teacher.parameters * own // parts if teacher is not None else 0,
        "critic": (learnt * (2 if offload else 4) + still * WIDE) // parts if valued else 0,
        **(engine if embedded else {}),  # only rank 0 has one
        "engine of the evaluation": sum(engine.values()) if apart else 0,
    }
    micro, narrow = max(loop.optimiser.micro_tokens, longest), loop.optimiser.autocast is not None
    # A group's prompt is forwarded once, and its rows are a micro-batch. Recipes in `AHEAD` keep several of them.
    if prompt is not None and not loop.optimiser.gradient_checkpointing and loop.recipe not in AHEAD:
        micro = max(longest, min(micro, prompt + loop.episodes_per_group * episode))
    if ranks > 1:  # `sequence_parallel` ranks share the tokens
        micro = -(-micro // config.processes.sequence_parallel)
    sizes = (shape.width, shape.queries, shape.keys, shape.feed)
    saved = SAVED.get((lora is not None, narrow, own), (20, 10, 8, 8))
    layer = micro * (sum(a * b for a, b in zip(saved, sizes, strict=True)) + (28 * lora.rank if lora else 0))
    if own == WIDE and not narrow and shape.keys != shape.queries:
        # No fused kernel in torch takes float32 with fewer key heads than query heads, so the attention matrix is kept.
        layer += micro * min(longest, micro) * shape.heads * WIDE
    # With checkpointing, the inputs of all layers and all activations of one layer are kept. The backward pass also
    # needs the gradients of one layer.
    whole = 1 if loop.optimiser.gradient_checkpointing else shape.layers
    inputs = micro * shape.width * own * (shape.layers - whole + 3)
    # `micro_tokens` counts tokens and patches together. For each patch, a layer keeps 16 times the width.
    patches = 0 if still or lora else micro * shape.seen[1] * 16 * own * (shape.seen[0] if whole > 1 else 1)
    update = {
        # The gradient of the output layer is summed separately before it is added to the others.
        "gradients": trained * WIDE // parts + (output * WIDE if lora is None else 0),
        "activations": max(layer * whole, patches) + inputs + micro * (3 * shape.feed + 2 * shape.width) * WIDE,
        "weights cast by autocast": shape.body * NARROW if narrow and own == WIDE else 0,
        # The sizes of `lm_head.CHUNK` and `lm_head.CHUNK_ROWS`. That module imports torch, and this one doesn't.
        "logits": 4 * WIDE * max(1 << 22, 55 * shape.vocabulary),
    }
    # After the update, servers get a copy of the weights. The check of the delivery needs 5 times 144 rows of logits.
    copied = (0 if embedded else model) + 5 * 144 * shape.vocabulary * WIDE
    if parts > 1:
        # FSDP2 gathers the embeddings, the output layer and the tower for the whole pass, and two layers at a time. In
        # an update, they have gradients. To publish, the weights are gathered one at a time.
        passed = shape.parameters - shape.body + shape.tower + 2 * shape.body // shape.layers
        update["weights and gradients of a pass"] = passed * (own + (WIDE if lora is None else 0))
        copied = (output + passed) * own + 5 * 144 * shape.vocabulary * WIDE
    if quantised:  # a weight is only whole while a layer computes with it
        update["weights out of 4 bits"] = shape.width * max(shape.feed, shape.queries) * own
    loading = {"weights of all ranks": model if parts > 1 and (lora is not None or shape.tower) else 0}
    times = fixed | update, fixed | {"weights to publish": copied}, loading
    memory = max(times, key=lambda items: sum(items.values()))
    batch = loop.rollouts * loop.groups * loop.episodes_per_group * episode
    evaluations = 2 + (max(loop.updates - 1, 0) // evaluation.every if evaluation.every else 0)
    measured = evaluations * (evaluation.limit or 0) * evaluation.attempts * episode if measures else 0
    needs = {"GiB": _gib(memory | {"sum": sum(memory.values())})}
    if offload:
        kept = {"optimiser": moments, "critic": learnt * 2 if valued else 0}
        needs["GiB of main memory"] = _gib({name: size // parts for name, size in kept.items()})
    tokens = {"episode": episode, "update": batch, "run": loop.updates * batch + measured}
    state = trained * (3 if loop.optimiser.ema else 2) + (trained if reads and reference is None else 0)
    checkpoint = (state + 3 * learnt // WIDE * valued) * WIDE
    checkpoint += shape.parameters * own * (2 if loop.optimiser.ema else 1) if lora is None else model + trained * WIDE
    disk = checkpoint * _kept(config, measures) + tokens["run"] // episode * 3000 + tokens["run"] * 40
    amounts: dict[str, float] = {**tokens}
    return {**needs, "GiB of disk": _gib({"checkpoint": checkpoint, "run": disk}), "tokens": amounts}


def _kept(config: TrainConfig, measures: bool) -> int:
    """Return the largest number of checkpoints at one time. A new one is written before an old one is deleted."""
    loop, warm = config.loop, config.warm is not None
    written = -(-loop.updates // loop.checkpoint_every) + warm
    if loop.keep_checkpoints is None:
        return written
    best = measures and config.evaluation.every is not None and config.evaluation.every < loop.updates
    return min(written, loop.keep_checkpoints + warm + best + 1)


def fit_memory(config: TrainConfig, given: TrainConfig, run: Path | None = None) -> TrainConfig:
    """Return the settings with gradient checkpointing off if the run fits into memory without it, and otherwise on. It
    is chosen once, and recorded with the other settings. `run` is the directory of a run that is resumed, whose choice
    is kept.

    `given` are the settings as the user gave them. Checkpointing that the user chose isn't changed. Neither is that of
    the profile if the memory can't be estimated: with servers, which may need memory of the same device, with players
    or with several processes. Imports torch.
    """
    shape, present = shape_of(config.engine.model), config.loop.optimiser.gradient_checkpointing
    if "gradient_checkpointing" in given.loop.optimiser.model_fields_set:
        return config
    if run is not None and (run / CONFIG).is_file():
        chosen = load_config(TrainConfig, run / CONFIG).loop.optimiser.gradient_checkpointing
    elif (
        shape is None
        or shape.drops
        or shape.body < TINY
        or config.engine.kind != "embedded"
        or config.players
        or _ranks()[1] > 1
    ):
        return config
    else:
        found = estimate(_checkpointing(config, False), prompt=PROMPT)
        free = _place(config)[1]
        if found is None or free is None:
            return config
        need = found["GiB"]["sum"] * 2**30
        chosen = need > free * ROOM
        if chosen != present:
            log.info(
                f"loop.optimiser.gradient_checkpointing={chosen}, since without it the run needs about {_gb(need)} of "
                f"{_gb(free)} of memory"
            )
    return _checkpointing(config, chosen)


def _checkpointing(config: TrainConfig, chosen: bool) -> TrainConfig:
    optimiser = config.loop.optimiser.model_copy(update={"gradient_checkpointing": chosen})
    return config.model_copy(update={"loop": config.loop.model_copy(update={"optimiser": optimiser})})


def _ranks() -> tuple[int, int]:
    """The rank of this process, and the number of processes."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _place(config: TrainConfig) -> tuple[str, int | None]:
    """Return what the memory of the trainer's device is called, and how many of its bytes are free, if this is
    known."""
    from ...agents.engines.embedded.pretrained import device_of

    device = device_of(config.trainer.device)
    if device.type == "cpu":
        return "memory", free_memory()
    import torch

    return "GPU memory", torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def say_needs(config: TrainConfig, out: Path) -> None:
    """Log about how much memory and disk a run of these settings needs, and warn if the machine has less. Nothing is
    said if the shape of the model is unknown, or if `out` is a file, which `train` refuses. Imports torch."""
    rank, ranks = _ranks()
    found = estimate(config, ranks, PROMPT)
    if found is None or rank or out.is_file():
        return
    checkpoint, run = (found["GiB of disk"].get(what, 0) * 2**30 for what in ("checkpoint", "run"))
    place, free = _place(config)
    memory = found["GiB"]["sum"] * 2**30 + (LIBRARIES if place == "memory" else 0)
    log.info(
        f"needs about {_gb(memory)} of {place}, and up to {_gb(run)} of disk (a checkpoint takes {_gb(checkpoint)}); "
        "`--dry-run` lists the parts"
    )
    if free is not None and free < memory:
        log.warning(
            f"{_gb(free)} of {place} are free: adapters (trainer.lora), a smaller loop.optimiser.micro_tokens or fewer "
            "engine.slots need less"
        )
    above = next(folder for folder in (out, *out.parents) if folder.is_dir())
    if (space := shutil.disk_usage(above).free) < run:
        log.warning(
            f"{_gb(space)} of disk are free in {above}: set loop.keep_checkpoints=1 and a larger "
            "loop.checkpoint_every, or another folder"
        )


def free_memory() -> int | None:
    """Return the bytes of main memory that this process can still get, or None if the system doesn't tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    group = Path("/sys/fs/cgroup")  # a container's
    try:
        limit, used = ((group / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        return free if limit == "max" else min(free, int(limit) - int(used))
    except (OSError, ValueError):
        return free


def _gb(size: float) -> str:
    return f"{size / 1e9:.2g} GB" if size < 1e10 else f"{size / 1e9:.0f} GB"


def seconds(config: TrainConfig, run: Path) -> dict[str, float] | None:
    """Return how many seconds an `update` took in the directory `run`, as the median, and the rest of `loop.updates`
    will take (`left`, without evaluations). Return None if fewer than two updates in a row were made there."""
    lines = [line for line in read_metrics(run / METRICS) if line["phase"] == "rl"]
    ends = [cast(float, line.get("perf/wall_seconds") or 0.0) for line in lines]  # missing if it was re-applied
    took = [end - begin for begin, end in pairwise(ends) if end > begin]  # each process counts from its own begin
    if not took:
        return None
    update = median(took)
    return {"update": round(update, 2), "left": round(update * max(config.loop.updates - len(lines), 0))}


def _gib(sizes: dict[str, int]) -> dict[str, float]:
    return {name: round(size / 2**30, 3) for name, size in sizes.items() if size}
