"""Estimates a training run's memory and tokens from its settings and the model's `config.json`, without torch.

The results are upper bounds. They leave out players, CUDA itself (about 0.5 GiB) and fragmentation in torch's
allocator.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import cast

from ...agents.setup.engine_config import EmbeddedConfig
from ...agents.setup.profiles import shape_of
from ...tapes.store.run_directory import METRICS, read_metrics
from ..loop.loop_config import OWN, SECOND
from ..run.player_config import adapters_of
from ..run.train_config import TrainConfig

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


def estimate(config: TrainConfig, ranks: int = 1) -> dict[str, dict[str, float]] | None:
    """Estimate the memory and tokens that a run by this many processes needs. Return None if the shape of the model is
    unknown.

    `GiB` has the memory of each item on the device of rank 0 and the `sum` of the items, at the moment with the largest
    sum. Other ranks need the same, or less if the engine is embedded. `GiB of main memory` has what `trainer.offload`
    keeps there. `tokens` has the maximum number of sampled tokens in an episode, in an update, and in the run with its
    evaluations. The profile of `config` must have been applied to it.
    """
    shape = shape_of(config.engine.model)
    if shape is None:
        return None
    parts = ranks if config.processes.shard else 1
    loop, settings, evaluation = config.loop, config.engine, config.evaluation
    lora = adapters_of(settings, config.trainer)
    own, output = NARROW if config.trainer.dtype == "bfloat16" else WIDE, shape.vocabulary * shape.width
    capacity = settings.capacity or 4096  # the default of the embedded engine
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
    cache = settings.slots * capacity * 2 * shape.layers * shape.keys * own
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
    micro, narrow = max(loop.optimiser.micro_tokens, capacity), loop.optimiser.autocast is not None
    if ranks > 1:  # `sequence_parallel` ranks share the tokens
        micro = -(-micro // config.processes.sequence_parallel)
    sizes = (shape.width, shape.queries, shape.keys, shape.feed)
    saved = SAVED.get((lora is not None, narrow, own), (20, 10, 8, 8))
    layer = micro * (sum(a * b for a, b in zip(saved, sizes, strict=True)) + (28 * lora.rank if lora else 0))
    if own == WIDE and not narrow and shape.keys != shape.queries:
        # No fused kernel in torch takes float32 with fewer key heads than query heads, so the attention matrix is kept.
        layer += micro * min(capacity, micro) * shape.heads * WIDE
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
    # After the update, a copy of the weights is published. Tied weights occur twice in it. The check of the delivery
    # needs 5 times 144 rows of logits.
    copied = model + 2 * output * own - (shape.parameters - shape.body) * own + 5 * 144 * shape.vocabulary * WIDE
    if parts > 1:
        # FSDP2 gathers the embeddings, the output layer and the tower for the whole pass, and two layers at a time. In
        # an update, they have gradients. To publish, the weights are gathered one at a time.
        passed = shape.parameters - shape.body + shape.tower + 2 * shape.body // shape.layers
        update["weights and gradients of a pass"] = passed * (own + (WIDE if lora is None else 0))
        copied = (output + passed) * own + 5 * 144 * shape.vocabulary * WIDE
    if quantised:  # a weight is only whole while a layer computes with it
        update["weights out of 4 bits"] = shape.width * max(shape.feed, shape.queries) * own
    loading = {"weights of all ranks": model if parts > 1 and (lora is not None or shape.tower) else 0}
    times = fixed | update, fixed | {"copy of the weights to publish": copied}, loading
    memory = max(times, key=lambda items: sum(items.values()))
    episode = loop.longest_episode(capacity) or capacity
    batch = loop.rollouts * loop.groups * loop.episodes_per_group * episode
    evaluations = 2 + (max(loop.updates - 1, 0) // evaluation.every if evaluation.every else 0)
    measured = evaluations * (evaluation.limit or 0) * evaluation.attempts * episode if measures else 0
    needs = {"GiB": _gib(memory | {"sum": sum(memory.values())})}
    if offload:
        kept = {"optimiser": moments, "critic": learnt * 2 if valued else 0}
        needs["GiB of main memory"] = _gib({name: size // parts for name, size in kept.items()})
    return {**needs, "tokens": {"episode": episode, "update": batch, "run": loop.updates * batch + measured}}


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
