"""LoRA, demonstrations beside the batch, checkpointing, autocast, the balance of experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tapereel.finetune import Critic, CriticTrainer, OptimiserConfig, Row, Stream, Trainer
from tapereel.finetune.data import BadBatch
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.trainer import EarlierWeights, score
from tapereel.finetune.trainer.logprobs import UnsupportedModel

from ..build import batch, episode, gradient, mixture, row, same, tiny_model


def adapted(seed: int = 0):
    torch.manual_seed(seed)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.3)
    return get_peft_model(tiny_model(), config).double()


@pytest.mark.ledger("F91")
def test_adapters_alone_are_trained_and_the_base_is_the_reference_without_a_second_copy():
    model = adapted()
    base = tiny_model()
    rows, episodes = batch(model=base)
    recipe = get_recipe("grpo", {"regulariser": [{"kind": "kl", "beta": 0.5}]})
    trainer = Trainer(model, recipe, OptimiserConfig(lr=0.05), reference=EarlierWeights(model, "base"))
    assert all("lora" in name for name in trainer.parameters)
    assert trainer.update(rows, episodes).applied
    stats = trainer.update(rows, episodes)
    assert stats.stream.ref is not None
    torch.testing.assert_close(stats.stream.ref, score(base, rows).logprob, rtol=1e-9, atol=1e-12)
    drift = stats.sums.mean("kl/reference/k3")
    assert drift is not None
    assert drift > 1e-4


@pytest.mark.ledger("F91", "P4")
def test_the_gradient_of_adapters_is_that_of_plain_autograd():
    model = adapted()
    model.eval()
    rows, episodes = batch(model=tiny_model())
    loss, grads = gradient(model, get_recipe("sft"), rows, episodes, micro_tokens=20)
    total = sum(len(r.own) for r in rows)
    by_hand = torch.zeros((), dtype=torch.float64)
    for r in rows:
        ids, own = torch.from_numpy(r.input_ids).long(), torch.from_numpy(r.own).long()
        lp = model(input_ids=ids[None]).logits[0].log_softmax(-1)[own - 1].gather(1, ids[own, None])
        by_hand = by_hand - lp.sum() / total
    by_hand.backward()
    same((loss, grads), (by_hand.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))


@pytest.mark.ledger("F65")
def test_demonstrations_add_their_cross_entropy_with_a_denominator_of_their_own():
    model = tiny_model()
    rows, episodes = batch(model=model)
    shown = [row("demo", "demo", turns=(5,), prompt=3)]
    plain = gradient(model, get_recipe("grpo"), rows, episodes)
    nll = gradient(model, get_recipe("sft"), shown, [episode("demo", "demo")])
    trainer = Trainer(
        model,
        get_recipe("grpo", {"regulariser": [{"kind": "nll", "coefficient": 0.3}]}),
        OptimiserConfig.model_construct(lr=0.0),
    )
    prepared = trainer.prepare(rows, episodes, demonstrations=shown)
    trainer.optimizer.zero_grad()
    done = trainer._accumulate(rows, prepared.batch.part())
    assert prepared.demonstrations is not None
    trainer._add_demonstrations(prepared.demonstrations, done)
    grads = {n: p.grad for n, p in model.named_parameters()}
    same((done.loss, grads), (plain[0] + 0.3 * nll[0], {n: g + 0.3 * nll[1][n] for n, g in plain[1].items()}))
    with pytest.raises(BadBatch, match=r"\bnll\b.*\b0\b"):
        trainer.update(rows, episodes)
    with pytest.raises(BadBatch, match=r"\bnll\b.*\b1\b"):
        Trainer(model, get_recipe("grpo")).update(rows, episodes, shown)


@pytest.mark.ledger("F65")
def test_demonstrations_teach_even_when_every_group_is_flat():
    model = tiny_model()
    rows = [row("a"), row("b")]
    flat = [episode("a", reward=1.0), episode("b", reward=1.0)]
    trainer = Trainer(
        model, get_recipe("grpo", {"regulariser": [{"kind": "nll", "coefficient": 0.3}]}), OptimiserConfig(lr=1e-2)
    )
    assert trainer.update(rows, flat, [row("demo", "demo")]).applied


@pytest.mark.ledger("F91")
@pytest.mark.parametrize("recipe", ["grpo", "gspo"])
def test_checkpointing_recomputes_the_same_gradient(recipe):
    rows, episodes = batch(model=tiny_model())
    plain = gradient(tiny_model(), get_recipe(recipe), rows, episodes, micro_tokens=20)
    again = gradient(tiny_model(), get_recipe(recipe), rows, episodes, micro_tokens=20, gradient_checkpointing=True)
    same(again, plain)


def test_checkpointing_refuses_dropout_by_the_name_of_the_module():
    model = adapted()
    with pytest.raises(UnsupportedModel, match=r"lora_dropout.*\b30%"):
        Trainer(model, get_recipe("sft"), OptimiserConfig(gradient_checkpointing=True))


def test_in_bfloat16_the_loss_is_near_and_the_weights_stay_in_float32():
    model = tiny_model(torch.float32)
    rows, episodes = batch()
    exact_loss = gradient(model, get_recipe("sft"), rows, episodes)[0]
    trainer = Trainer(model, get_recipe("sft"), OptimiserConfig(lr=1e-3, autocast="bfloat16"))
    losses = [trainer.update(rows, episodes).loss for _ in range(20)]
    assert losses[0] == pytest.approx(exact_loss, rel=2e-2)
    assert losses[0] != exact_loss
    assert losses[-1] < losses[0]
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.ledger("F66")
def test_the_balance_of_experts_is_that_of_the_whole_batch_and_adds_linearly():
    model = mixture()
    rows, episodes = batch()
    sft = get_recipe("sft")
    plain = gradient(model, sft, rows, episodes)
    routed = {
        c: gradient(model, sft.but({"regulariser": [{"kind": "aux", "coefficient": c}]}), rows, episodes)
        for c in (0.5, 1.0)
    }
    want = hf_balance(model.model, rows)
    assert routed[1.0][0] - plain[0] == pytest.approx(want.item(), rel=1e-5)
    model.zero_grad()
    want.backward()
    for name, p in model.named_parameters():
        aux = torch.zeros_like(p) if p.grad is None else p.grad
        for c, (_, grads) in routed.items():
            torch.testing.assert_close(grads[name], plain[1][name] + c * aux, rtol=1e-3, atol=1e-6)
    model.zero_grad()
    balanced = sft.but({"regulariser": [{"kind": "aux", "coefficient": 1.0}]})
    many = gradient(model, balanced, rows, episodes, micro_tokens=9)
    assert many[0] == pytest.approx(routed[1.0][0], rel=1e-5)
    for name, g in many[1].items():
        torch.testing.assert_close(g, routed[1.0][1][name], rtol=1e-3, atol=1e-6)


def hf_balance(body: torch.nn.Module, rows: Sequence[Row]) -> torch.Tensor:
    """The loss of transformers over the tokens that are forwarded: of each row those before its last own token."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    width = max(int(r.own[-1]) for r in rows)
    ids, mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width)
    for i, r in enumerate(rows):
        n = int(r.own[-1])
        ids[i, :n], mask[i, :n] = torch.from_numpy(r.input_ids[:n]).long(), 1
    found = load_balancing_loss_func(body(input_ids=ids, output_router_logits=True).router_logits, 4, 2, mask)
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.ledger("F66")
def test_demonstrations_are_balanced_too_in_proportion_to_their_coefficient() -> None:
    model, (rows, episodes), (shown, _) = mixture(), batch(), batch(seed=5)
    shown = [dataclasses.replace(r, tape=f"demo-{r.tape}", group="demo") for r in shown]
    found = {}
    for c in (0.0, 0.5):
        terms = [{"kind": "nll", "coefficient": 0.4}, {"kind": "aux", "coefficient": c}]
        trainer = Trainer(model, get_recipe("sft", {"regulariser": terms}), OptimiserConfig(micro_tokens=20))
        found[c] = trainer.gradient(trainer.prepare(rows, episodes, demonstrations=shown))
    want = 0.5 * hf_balance(model.model, rows) + 0.4 * 0.5 * hf_balance(model.model, shown)
    assert found[0.5][0].loss - found[0.0][0].loss == pytest.approx(want.item(), rel=1e-5)
    assert found[0.5][0].sums["demonstrations/aux"] == pytest.approx(hf_balance(model.model, shown).item(), rel=1e-5)
    want.backward()
    for name, p in model.named_parameters():
        aux = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(found[0.5][1][name], found[0.0][1][name] + aux, rtol=1e-3, atol=1e-6)


@pytest.mark.ledger("F66")
def test_a_critic_with_a_body_of_its_own_is_balanced_and_one_without_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (rows, episodes) = mixture(), batch()
    stream = Stream.of(rows, episodes)
    stream = stream.having(value=torch.zeros(len(stream)))
    target, entered = torch.ones(len(stream)), torch.ones(len(stream), dtype=torch.bool)
    grads, sums = {}, {}
    for c in (0.0, 0.5):
        critic = Critic.of(model)
        torch.nn.init.constant_(critic.head.weight, 0.1)
        trainer = CriticTrainer(critic, OptimiserConfig(grad_clip=None, micro_tokens=20), balance=c)
        monkeypatch.setattr(
            trainer.optimizer, "step", lambda critic=critic, c=c: grads.update({c: _grads(critic.body)})
        )
        sums[c] = trainer.update(rows, stream, target, entered)
    body = Critic.of(model).body
    want = hf_balance(body, rows)
    want.backward()
    assert sums[0.5]["value/aux"] == pytest.approx(want.item(), rel=1e-5)
    assert sums[0.5].counts["value/aux"] == 1, "the parts of several micro-batches are one value"
    for name, aux in _grads(body).items():
        torch.testing.assert_close(grads[0.5][name], grads[0.0][name] + 0.5 * aux, rtol=1e-3, atol=1e-6)
    head = CriticTrainer(Critic.on(model), balance=0.5)
    assert "value/aux" not in head.update(rows, stream, target, entered)
    assert all(p.grad is None for p in model.parameters())


def _grads(body: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in body.named_parameters()}


def test_a_model_without_experts_has_none_to_balance():
    rows, episodes = batch()
    recipe = get_recipe("sft", {"regulariser": [{"kind": "aux", "coefficient": 1.0}]})
    with pytest.raises(UnsupportedModel, match=r"LlamaModel.*`aux`"):
        Trainer(tiny_model(), recipe).update(rows, episodes)
