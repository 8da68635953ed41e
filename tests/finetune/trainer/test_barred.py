"""Tokens whose distribution lacks end ids (`min_tokens`), against dense logits with those ids left out."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tapereel.finetune import Row
from tapereel.finetune.objective import Score
from tapereel.finetune.trainer import forward, lm_head, plan, score

from ..build import row, tiny_model

ENDS = (3, 22)


def barred_rows() -> list[Row]:
    """Rows with a shared prefix and turns of several lengths; the bars of their calls differ."""
    made = [row(f"t{i}", turns=(4, 2), prompt=70, temperature=0.7, rng=np.random.default_rng(5)) for i in range(2)]
    rng = np.random.default_rng(6)
    made += [row("u", turns=(6, 1), temperature=0.7, rng=rng), row("v", turns=(3,), rng=rng)]
    bars = [((2, ENDS), (1, ENDS)), ((4, (3,)), (0, ())), ((3, ENDS), (5, (7,))), ()]
    for r in made:
        own = r.input_ids[r.own]
        r.input_ids[r.own] = np.where(np.isin(own, (*ENDS, 7)), 5, own)
    return [dataclasses.replace(r, bars=b) for r, b in zip(made, bars, strict=True)]


def dense(model: Any, rows: list[Row]) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies) of all own tokens, one row at a time, from whole logits."""
    lp, h = [], []
    for r in rows:
        logits = model(input_ids=torch.from_numpy(r.input_ids).long()[None]).logits[0]
        for k, at in enumerate(r.own.tolist()):
            z = logits[at - 1] / float(r.temperature[k])
            first, ids = r.bars[r.call[k]] if r.bars else (0, ())
            kept = [v for v in range(len(z)) if not (int(r.offset[k]) < first and v in ids)]
            p = z[kept].log_softmax(-1)
            lp.append(p[kept.index(int(r.input_ids[at]))])
            h.append(-(p.exp() * p).sum())
    return torch.stack(lp), torch.stack(h)


@pytest.mark.parametrize("way", [{}, {"pack": True}, {"share": True}, {"micro_tokens": 1}])
@pytest.mark.parametrize("chunk", [23, 23 * 3, 1 << 22])
def test_scores_and_gradients_are_those_of_the_distribution_without_the_ids(
    way: dict[str, Any], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm_head, "CHUNK", chunk)
    monkeypatch.setattr(lm_head, "CHUNK_ROWS", 1)
    model, rows = tiny_model(), barred_rows()
    want_lp, want_h = dense(model, rows)
    weight = torch.linspace(-1, 1, len(want_lp), dtype=torch.float64)
    (want_lp * weight + 0.3 * want_h * weight.flip(0)).sum().backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    live = torch.ones(len(want_lp), dtype=torch.bool)
    live[3] = False  # a token that isn't forwarded must not shift the pairs of the others
    lp, h = want_lp.detach().clone(), want_h.detach().clone()
    for micro in plan(rows, live=live, **way):
        found = forward(model, micro, entropy=True)
        assert found.entropy is not None
        lp[micro.index], h[micro.index] = found.logprob.detach(), found.entropy.detach()
        w = weight[micro.index], weight.flip(0)[micro.index]
        (found.logprob * w[0] + 0.3 * found.entropy * w[1]).sum().backward()
    torch.testing.assert_close(lp, want_lp.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(h, want_h.detach(), rtol=0, atol=1e-10)
    model_grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    one, entropy = dense(model, rows)
    (one[3] * weight[3] + 0.3 * entropy[3] * weight.flip(0)[3]).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(model_grads[name] + p.grad, want[name], rtol=0, atol=1e-10)


def test_maximum_likelihood_scores_the_model_itself() -> None:
    model, rows = tiny_model(), barred_rows()
    whole = [dataclasses.replace(r, bars=(), temperature=np.ones_like(r.temperature)) for r in rows]
    assert torch.equal(score(model, rows, Score(temperature="one")).logprob, score(model, whole).logprob)


def test_a_part_of_a_row_keeps_its_bars_and_a_flat_view_has_no_number_for_them() -> None:
    whole = barred_rows()[2]
    part = whole.where(np.arange(len(whole.own)) >= 2)
    assert whole.barred(np.arange(7)).tolist() == [*([k, v] for k in (0, 1, 2) for v in ENDS), [6, 7]]
    assert part.barred(np.arange(5)).tolist() == [[0, 3], [0, 22], [4, 7]]
    assert np.isnan(whole.plain()).tolist() == [True] * 3 + [False] * 3 + [True]
