"""Small batches for tests: rows and episodes spelled out token by token, and a model small enough for float64."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from tapereel.finetune import Episode, OptimiserConfig, Row, Stream, Trainer
from tapereel.finetune.objective import Term
from tapereel.finetune.trainer import score
from tapereel.tapes import Status

LEDGER = Path(__file__).parents[1] / "ledger"
VOCABULARY = 23


def choices(term: type[Term], field: str) -> tuple[Any, ...]:
    """The values that a field of a term may have, from its `Literal`."""
    found = get_args(term.model_fields[field].annotation)
    assert found, f"{term.__name__}.{field} is no Literal"
    return found


@cache
def ledger(name: str) -> dict[str, Any]:
    """Inputs and expected numbers of one block of the ledger."""
    return json.loads((LEDGER / f"{name}.json").read_text())


def row(
    tape: str = "a",
    group: str = "g",
    *,
    turns: Sequence[int] = (3,),
    first_turn: int = 0,
    prompt: int = 2,
    between: int = 1,
    after: int = 0,
    old: Sequence[float] | None = None,
    temperature: float = 1.0,
    version: int = 0,
    rng: np.random.Generator | None = None,
    calls: Sequence[str] | None = None,
) -> Row:
    """A row whose turn i has turns[i] own tokens: prompt, own, `between` of the environment's, own, ..., `after`."""
    rng = rng or np.random.default_rng(0)
    own: list[int] = []
    of_turn: list[int] = []
    offset: list[int] = []
    at = prompt
    for i, n in enumerate(turns):
        own += range(at, at + n)
        of_turn += [first_turn + i] * n
        offset += range(n)
        at += n + between
    length = at - between + after
    n = len(own)
    names = calls or [f"{tape}/{first_turn + i}" for i in range(len(turns))]
    return Row(
        tape=tape,
        group=group,
        input_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
        own=np.array(own, np.int32),
        old=np.array([-1.0] * n if old is None else old, np.float32),
        temperature=np.full(n, temperature, np.float32),
        version=np.full(n, version, np.int32),
        call=np.array(of_turn, np.int32) - first_turn,
        turn=np.array(of_turn, np.int32),
        offset=np.array(offset, np.int32),
        calls=tuple(names),
        agents=("player",) * len(turns),
        versions=("run:0",),
    )


def simple(
    rewards: Sequence[float | None],
    groups: Sequence[str] | None = None,
    *,
    tokens: int = 2,
    forks: Sequence[str] | None = None,
) -> tuple[list[Row], list[Episode]]:
    """One row of `tokens` own tokens and one reward per episode."""
    groups = groups or ["g"] * len(rewards)
    rows = [row(f"t{i}", g, turns=(tokens,)) for i, g in enumerate(groups)]
    episodes = [
        Episode(tape=f"t{i}", group=g, reward=r, fork=forks[i] if forks else None)
        for i, (r, g) in enumerate(zip(rewards, groups, strict=True))
    ]
    return rows, episodes


def exact(rows: Sequence[Row], episodes: Sequence[Episode], **columns: Any) -> Stream:
    """The stream in float64, with optional columns (and `old`) given as numbers."""
    stream = Stream.of(rows, episodes, dtype=torch.float64)
    return stream.having(**{name: doubles(values) for name, values in columns.items()})


def doubles(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def episode(tape: str = "a", group: str = "g", reward: float | None = 1.0, **fields: Any) -> Episode:
    if fields.pop("cut", False):
        fields["status"] = Status.TRUNCATED
    return Episode(tape=tape, group=group, reward=reward, **fields)


def tiny_model(dtype: torch.dtype = torch.float64, seed: int = 0, **config: Any) -> Any:
    """Two layers, hidden 16, vocabulary 23."""
    from transformers import LlamaConfig, LlamaForCausalLM

    state = torch.get_rng_state()
    torch.manual_seed(seed)
    defaults: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**defaults, **config})).to(dtype)
    torch.set_rng_state(state)
    if dtype == torch.float64:
        _exact_norms(model)
    return model


def mixture(dtype: torch.dtype = torch.float32) -> Any:
    """Two layers of four experts, vocabulary 23."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            initializer_range=0.3,
            router_aux_loss_coef=1.0,
        )
    ).to(dtype)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # the kernel for all experts at once takes no float64
    return model


def tiny_qwen3(dtype: torch.dtype = torch.float64, *, experts: bool = False, **config: Any) -> Any:
    """Two layers, four heads, vocabulary 23; with `experts`, a mixture of four."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 6,
        "initializer_range": 0.3,
    }
    torch.manual_seed(0)
    if experts:
        shape |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
        model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**shape, **config})).to(dtype)
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**{**shape, **config})).to(dtype)
    if dtype == torch.float64:
        _exact_norms(model)
        if experts:
            model.set_experts_implementation("eager")  # the kernel for all experts at once takes no float64
    return model


def batch(seed: int = 0, model=None) -> tuple[list[Row], list[Episode]]:
    """Two groups of three episodes, 1 to 3 turns each; `old` near the model's own log-probs."""
    rng = np.random.default_rng(seed)
    rows = [
        row(
            f"t{i}",
            f"g{i // 3}",
            turns=[int(rng.integers(1, 5)) for _ in range(int(rng.integers(1, 4)))],
            prompt=int(rng.integers(1, 6)),
            rng=rng,
        )
        for i in range(6)
    ]
    if model is not None:
        lp = score(model, rows).logprob.float().numpy()
        lp = np.minimum(lp + rng.normal(0, 0.15, len(lp)).astype(np.float32), 0)
        at = np.concatenate([[0], np.cumsum([len(r.own) for r in rows])])
        rows = [dataclasses.replace(r, old=lp[a:b]) for r, a, b in zip(rows, at, at[1:], strict=False)]
    rewards = (1.0, 0.0, 0.0, 0.5, 1.0, 0.0)
    return rows, [Episode(tape=r.tape, group=r.group, reward=x) for r, x in zip(rows, rewards, strict=True)]


def trainer_of(model: Any, recipe: Any, **named: Any) -> Trainer:
    """A trainer. named: its options, and its other arguments."""
    options = {name: named.pop(name) for name in list(named) if name in OptimiserConfig.model_fields}
    # A test may want a learning rate of 0, which a configuration can't have.
    return Trainer(model, recipe, OptimiserConfig.model_construct(**options), **named)


def gradient(
    model: Any, recipe: Any, rows: Sequence[Row], episodes: Sequence[Episode], **options: Any
) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradients by name) of one update that isn't taken."""
    trainer = trainer_of(model, recipe, lr=0.0, grad_clip=None, **options)
    prepared = trainer.prepare(rows, episodes)
    trainer.optimizer.zero_grad()
    done = trainer._accumulate(prepared.rows, prepared.batch.part())
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return done.loss, grads


def same(one: tuple[float, dict[str, Tensor]], other: tuple[float, dict[str, Tensor]], rtol: float = 1e-9) -> None:
    """Two results of `gradient` are equal."""
    assert one[0] == pytest.approx(other[0], rel=rtol, abs=1e-13)
    assert one[1].keys() == other[1].keys()
    for name, g in one[1].items():
        torch.testing.assert_close(g, other[1][name], rtol=rtol, atol=1e-12)


def _exact_norms(module: torch.nn.Module) -> None:
    """transformers' norms go through float32; torch's own does not."""
    for name, child in module.named_children():
        if type(child).__name__ in ("LlamaRMSNorm", "Qwen3RMSNorm", "Qwen3MoeRMSNorm"):
            norm = torch.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon, dtype=torch.float64)
            norm.load_state_dict(child.state_dict())
            setattr(module, name, norm)
        else:
            _exact_norms(child)
