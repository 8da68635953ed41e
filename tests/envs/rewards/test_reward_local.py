"""A local reward model: a tiny transformers model, loaded when it's needed, asked, and put away."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tapereel.envs.rewards.local_models import LocalReward, local_reward
from tapereel.envs.rewards.reward_models import Sample
from tapereel.tapes.errors import UsageError

from ..scored import failure, scores, tapes

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("reward_model"), labels=1)


def saved(folder: Path, labels: int) -> Path:
    from tapereel.agents.engines.embedded.tiny_model import char_tokenizer

    tokenizer = char_tokenizer("abcdefgh user:assistant\n")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        num_labels=labels,
        pad_token_id=None,
    )
    transformers.LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def sample(answer: str) -> Sample:
    messages = ({"role": "user", "content": "a"}, {"role": "assistant", "content": answer})
    return Sample("t", "user: a", f"user: a\nassistant: {answer}", messages)


@pytest.mark.ledger("F21")
def test_it_is_loaded_with_the_first_score_brought_to_its_device_and_put_away(folder: Path):
    model = LocalReward(folder, device="cpu", put_away="cpu", batch=2)
    assert model.model is None
    moves: list[Any] = []
    texts = [sample("a" * n) for n in (1, 2, 3)]
    first = model._score(texts)
    loaded = model.model
    moved = loaded.to
    loaded.to = lambda place: (moves.append(place), moved(place))[1]
    assert model._score(texts) == first
    assert moves == ["cpu", "cpu"], "there, and back"
    assert model.model is loaded, "loaded once"
    assert all(isinstance(score, float) for score in first)
    assert len(set(first)) == 3


@pytest.mark.ledger("F21")
def test_batches_and_padding_change_no_score(folder: Path):
    texts = [sample("abc"), sample("abcdefgh"), sample("h")]
    alone = [LocalReward(folder)._score([text])[0] for text in texts]
    assert LocalReward(folder, batch=2)._score(texts) == pytest.approx(alone, abs=1e-5)
    whole = LocalReward(folder, put_away=None)
    assert whole._score(texts) == pytest.approx(alone, abs=1e-5)
    inputs = whole.tokenizer(whole._text(texts[0]), return_tensors="pt", add_special_tokens=False)
    assert alone[0] == pytest.approx(whole.model(**inputs).logits.item(), abs=1e-5)


def test_a_failing_forward_puts_it_away_too(folder: Path):
    model = LocalReward(folder)
    model._score([sample("a")])
    moves: list[Any] = []
    model.model.to = moves.append
    model.tokenizer = None
    with pytest.raises(TypeError):
        model._score([sample("a")])
    assert moves == ["cpu", "cpu"]


class Wrapped:
    """A model that gives its logits otherwise."""

    def __init__(self, inner: Any, wrap: Any) -> None:
        self.inner, self.wrap, self.config = inner, wrap, inner.config

    def to(self, place: str) -> None:
        self.inner.to(place)

    def __call__(self, **inputs: Any) -> Any:
        return self.wrap(self.inner(**inputs).logits)


def test_a_model_that_gives_a_dict_or_a_tensor_will_do_and_one_of_many_labels_wont(folder: Path, tmp_path: Path):
    model = LocalReward(folder)
    right = model._score([sample("abc")])

    inner = model.model
    for wrap in (lambda logits: {"score": logits}, lambda logits: logits.squeeze(-1)):
        model.model = Wrapped(inner, wrap)
        assert model._score([sample("abc")]) == right
    with pytest.raises(ValueError, match=r"\(1, 3\).*num_labels=1"):
        LocalReward(saved(tmp_path, labels=3))._score([sample("a")])


@pytest.mark.ledger("F21")
def test_as_a_source_it_scores_the_tapes_that_wait_in_one_go(folder: Path):
    source = local_reward(folder, name="rm", batch=4)
    assert not source.pure
    found = tapes(["abc", "h", "abcdefgh"])
    records = scores([source], *found)
    expected = [LocalReward(folder)._score([sample_of_tape(tape)])[0] for tape in found]
    assert [r.value for own in records for r in own] == pytest.approx(expected, abs=1e-5)
    assert [(r.name, r.weight) for own in records for r in own] == [("rm", 1.0)] * 3


def sample_of_tape(tape: Any) -> Sample:
    from tapereel.envs.rewards.reward_models import sample_of

    return sample_of(tape)


def test_a_folder_that_is_not_there_is_refused_where_it_is_written(tmp_path: Path):
    for folder in (tmp_path / "none", "nofolder"):
        with pytest.raises(UsageError, match=re.escape(repr(str(folder)))):
            local_reward(folder)


def test_a_folder_without_a_model_leaves_the_tape_unscored(tmp_path: Path):
    (records,) = scores([local_reward(tmp_path, name="rm")], *tapes(["a"]))
    assert f"UsageError: {tmp_path}" in failure(records)
