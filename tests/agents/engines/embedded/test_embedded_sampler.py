"""The counter-based sampler draws from the distribution whose log-probs it reports."""

from __future__ import annotations

import math
from array import array

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from tapereel.agents.engines.embedded.sampler import as_seed, draw, penalised, uniforms


def mix(z: int) -> int:
    """SplitMix64's finaliser, in plain integers."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_the_numbers_are_locked() -> None:
    """Changing these changes what every seed samples, and so what any recorded run can be re-sampled to."""
    seeds = [0, 1, 2**64 - 1, -2, 2**63 + 12345]
    positions = [0, 1, 77, 1000, 2**31]
    got = uniforms(np.array([as_seed(seed) for seed in seeds], dtype=np.uint64), np.array(positions))
    golden = 0x9E3779B97F4A7C15
    expected = [
        (mix((mix(s % 2**64) + (n + 1) * golden) % 2**64) >> 11) / 2**53 for s, n in zip(seeds, positions, strict=True)
    ]
    assert got.tolist() == expected
    assert got[0] == (0xE220A8397B1DCDAF >> 11) / 2**53  # the published first output of SplitMix64 for seed 0


def test_they_look_uniform_and_unrelated() -> None:
    seeds = np.arange(256, dtype=np.uint64)[:, None].repeat(256, 1).reshape(-1)
    table = uniforms(seeds, np.tile(np.arange(256), 256)).reshape(256, 256)
    assert table.min() >= 0.0
    assert table.max() < 1.0
    counts = np.histogram(table, 64, (0, 1))[0]
    expected = table.size / 64
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi2 - 63) < 5 * math.sqrt(2 * 63)
    for other in (np.roll(table, 1, 0), np.roll(table, 1, 1), table.T):
        assert abs(np.corrcoef(table.ravel(), other.ravel())[0, 1]) < 5 / 256


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_a_sweep_of_numbers_draws_each_token_in_proportion(temperature: float) -> None:
    logits = torch.tensor([2.0, -1.0, 0.5, -30.0, 1.0])
    n = 20_000
    uniform = (np.arange(n) + 0.5) / n
    ids, logprobs = draw(logits.expand(n, 5), np.full(n, temperature), uniform)
    exact = torch.log_softmax(logits.double() / temperature, -1)
    share = np.bincount(ids, minlength=5) / n
    np.testing.assert_allclose(share, exact.exp().numpy(), atol=1.0 / n)
    np.testing.assert_allclose(logprobs, exact[torch.tensor(ids)].numpy(), rtol=0, atol=1e-6)


def test_the_edges_of_the_unit_interval_draw_what_is_possible() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]]).repeat(2, 1)
    ids, _ = draw(logits, np.ones(2), np.array([0.0, 1.0 - 2.0**-53]))
    assert ids == [1, 3]


def test_temperature_zero_takes_the_first_of_the_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [0.0, 3.0, 3.0, 1.0]])
    ids, logprobs = draw(logits, np.array([0.0, 1.0]), np.array([0.999, 0.999]))
    assert ids == [1, 3]
    exact = torch.log_softmax(logits[0], -1)
    assert logprobs == pytest.approx([float(exact[1]), float(exact[3])], abs=1e-6)


def test_a_row_without_finite_probabilities_says_so_and_spares_the_others() -> None:
    logits = torch.tensor([[0.0, float("nan")], [0.0, 1.0], [float("inf"), 0.0]])
    _, logprobs = draw(logits, np.ones(3), np.full(3, 0.3))
    assert [math.isnan(x) for x in logprobs] == [True, False, True]


def kept_by(p: np.ndarray, top_p: float, top_k: int) -> set[int]:
    """The plain reading of both filters."""
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))[: top_k or len(p)]
    total, kept, mass = sum(p[i] for i in order), set(), 0.0
    for i in order:
        if kept and mass >= top_p - 1e-12:
            break
        kept.add(i)
        mass += p[i] / total
    return kept


@settings(max_examples=60)
@given(
    st.lists(st.integers(-20, 20), min_size=2, max_size=9),
    st.floats(0.05, 1.0),
    st.integers(0, 10),
    st.sampled_from([0.6, 1.0, 1.4]),
)
def test_filters_narrow_the_draw_and_leave_the_log_prob_alone(
    eighths: list[int], top_p: float, top_k: int, temperature: float
) -> None:
    logits = torch.tensor([e / 8 for e in eighths])
    n = 400
    uniform = (np.arange(n) + 0.5) / n
    ids, logprobs = draw(logits.expand(n, -1), np.full(n, temperature), uniform, np.full(n, top_p), np.full(n, top_k))
    exact = torch.log_softmax(logits.double() / temperature, -1).numpy()
    p = np.exp(exact)
    kept = kept_by(p, top_p, top_k)
    assert set(ids) <= kept
    mass = sum(p[i] for i in kept)
    for i in kept:
        assert abs(ids.count(i) / n - p[i] / mass) <= 1.01 / n
    np.testing.assert_allclose(logprobs, exact[ids], rtol=0, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_penalties_and_min_p_change_the_draw_and_leave_the_log_prob_alone(temperature: float) -> None:
    """Compared with transformers' processors, and with OpenAI's formula for the two penalties that it lacks."""
    torch.manual_seed(0)
    prompt, ids = array("i", [1, 1, 4]), array("i", [2, 3, 3, 3])
    logits, n = torch.randn(12), 4000
    asked = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.25, "min_p": 0.2}
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([[*prompt, *ids]]), logits[None].clone())
    expected[0, 2] -= 0.4 + 0.25
    expected[0, 3] -= 3 * 0.4 + 0.25
    found = penalised(logits, asked, prompt, ids)
    torch.testing.assert_close(found, expected[0])
    uniform = (np.arange(n) + 0.5) / n
    rows = found.expand(n, -1)
    drawn, logprobs = draw(
        logits.expand(n, -1), np.full(n, temperature), uniform, drawn=rows, min_p=np.full(n, asked["min_p"])
    )
    scale = temperature or 1.0
    kept = MinPLogitsWarper(0.2)(torch.empty(1, 0, dtype=torch.long), expected / scale)[0].softmax(-1)
    share = np.bincount(drawn, minlength=12) / n
    wanted = kept.numpy() if temperature else np.eye(12)[int(expected.argmax())]
    np.testing.assert_allclose(share, wanted, atol=2.0 / n)
    whole = torch.log_softmax(logits.double() / scale, -1)
    np.testing.assert_allclose(logprobs, whole[torch.tensor(drawn)].numpy(), rtol=0, atol=1e-6)
    torch.testing.assert_close(penalised(logits, {"min_p": 0.2}, prompt, ids), logits)
