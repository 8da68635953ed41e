"""A local reward model: a transformers model for sequence classification, in this process.

Torch is imported and the model is loaded at the first score. The model is moved to its device before each batch of
scores, and back after it. Between batches, sampling and training can use the device's memory.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from ...tapes import Tape
from ...tapes.common.hub import NotFound, model_folder
from ...tapes.errors import MissingExtra, UsageError
from .reward_models import Sample, WrongAnswer, model_source, sample_of
from .sources import RewardSource


class LocalOptions(TypedDict, total=False):
    """The options of `LocalReward`, which documents them."""

    device: str
    put_away: str | None
    batch: int
    length: int | None
    dtype: str | None


class LocalReward:
    """Scores samples with a model that returns one logit per sample, as `logits`, as `score` or as a bare tensor."""

    def __init__(
        self,
        folder: str | Path,
        *,
        device: str = "cpu",
        put_away: str | None = "cpu",
        batch: int = 8,
        length: int | None = None,
        dtype: str | None = None,
    ) -> None:
        """
        folder: The model and tokenizer in Hugging Face format, or a model on the hub as `org/name@revision`. If the
            tokenizer has a chat template, the rendered messages are scored, otherwise the query.
        device: The device for scoring.
        put_away: The device that holds the model between scores. None keeps the model on `device`.
        batch: The number of samples in one forward pass.
        length: The maximum number of tokens. A longer sample is truncated on the left. None uses the model's maximum.
        dtype: The type of the weights, such as `bfloat16`. None uses the stored type.
        """
        if batch < 1:
            raise ValueError(f"batch must be at least 1, not {batch}")
        try:
            self.folder = str(model_folder(folder))
        except NotFound as error:
            raise UsageError(f"a reward model: {error}") from error
        self.device, self.put_away, self.batch = device, put_away, batch
        self.length, self.dtype = length, dtype
        self.model: Any = None
        """The model, or None before the first score."""
        self.tokenizer: Any = None
        self._lock = threading.Lock()

    async def score(self, samples: Sequence[Sample]) -> list[float | None]:
        """Score the samples in a thread, because a forward pass would block the event loop and thus every episode."""
        return list(await asyncio.to_thread(self._score, samples))

    def _score(self, samples: Sequence[Sample]) -> list[float]:
        try:
            import torch
        except ModuleNotFoundError as error:
            raise MissingExtra(error.name or "torch", "train", "a local reward model") from error
        # Only one batch runs at a time: another thread must not move the model to `put_away` during a forward pass.
        with self._lock:
            self._load()
            queries = [self._text(sample) for sample in samples]
            self.model.to(self.device)
            try:
                with torch.inference_mode():
                    parts = [self._forward(queries[k : k + self.batch]) for k in range(0, len(queries), self.batch)]
            finally:
                if self.put_away is not None:
                    self.model.to(self.put_away)
        return [value for part in parts for value in part]

    def _load(self) -> None:
        if self.model is not None:
            return
        try:
            from transformers import AutoModelForSequenceClassification, AutoTokenizer
        except ModuleNotFoundError as error:
            raise MissingExtra(error.name or "transformers", "train", "a local reward model") from error
        # Without this argument, transformers asks on the terminal whether to execute code from the model's folder.
        own: dict[str, Any] = {"trust_remote_code": False}
        options = own if self.dtype is None else {**own, "dtype": self.dtype}
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(
                self.folder, padding_side="right", truncation_side="left", **own
            )
            model: Any = AutoModelForSequenceClassification.from_pretrained(self.folder, **options).eval()
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.folder} has no reward model in Hugging Face format: {error}") from error
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        if model.config.pad_token_id is None:
            model.config.pad_token_id = tokenizer.pad_token_id
        self.tokenizer, self.model = tokenizer, model

    def _text(self, sample: Sample) -> str:
        if getattr(self.tokenizer, "chat_template", None):
            return self.tokenizer.apply_chat_template(list(sample.messages), tokenize=False)
        return sample.query

    def _forward(self, queries: list[str]) -> list[float]:
        longest = self.length or getattr(self.model.config, "max_position_embeddings", None)
        templated = bool(getattr(self.tokenizer, "chat_template", None))
        ready = self.tokenizer(
            queries,
            return_tensors="pt",
            padding=True,
            truncation=longest is not None,
            max_length=longest,
            add_special_tokens=not templated,
        )
        answer: Any = self.model(
            input_ids=ready["input_ids"].to(self.device), attention_mask=ready["attention_mask"].to(self.device)
        )
        scores = answer if hasattr(answer, "numel") else answer["score"] if "score" in answer else answer["logits"]
        if scores.numel() != len(queries):
            raise WrongAnswer(
                f"the model in {self.folder} returns the shape {tuple(scores.shape)} for {len(queries)} samples: a "
                "reward model needs one output (num_labels=1)"
            )
        return scores.float().reshape(-1).cpu().tolist()


def local_reward(
    folder: str | Path,
    *,
    name: str = "reward_model",
    weight: float = 1.0,
    size: int = 256,
    sample: Callable[[Tape], Sample] = sample_of,
    **options: Unpack[LocalOptions],
) -> RewardSource[Tape]:
    """Return a source for `LocalReward(folder, **options)`.

    The model is loaded once and scores up to `size` tapes at a time. The source is not pure: its scores can't be
    recomputed exactly, because their last bits depend on the device and the batch.
    """
    return model_source(LocalReward(folder, **options), name=name, weight=weight, size=size, sample=sample)
