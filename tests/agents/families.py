"""Small tokenizers in the styles of the model families, each with a short version of its family's chat template."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox asked what 47 times 83 is, and the answer is 3901.",
    "user assistant system tool answer question <think> because </think> so the pear costs 12 and the plum 7",
    '{"name": "lookup", "arguments": {"key": "pear"}} {"result": "ripe", "price": 12.50}',
    "Für zwölf Äpfel zahlt man 3 €; naïve café, 東京 and 🙂 are not ASCII.\n\nIs it?  Yes:\n- one\n- two\n",
    "# Tools\n\nYou may call one. Cutting Knowledge Date: December 2023 You are a helpful assistant.",
] * 4


@dataclass(frozen=True)
class Family:
    """One family's tokens and way with spaces."""

    template: str
    special: tuple[str, ...]
    eos: str
    bos: str | None = None
    plain: tuple[str, ...] = ()
    """Added tokens that are not special."""
    rstrip: tuple[str, ...] = ()
    """Special tokens that swallow the white space behind them."""
    kind: str = "bytes"
    """`bytes`: byte-level BPE; `first`, `every`, `none`: SentencePiece-like BPE that puts a space before the first word
    of a text, of every piece of text between special tokens, or nowhere."""


FAMILIES = {
    "chatml": Family("chatml", ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "qwen3": Family(
        "qwen3",
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
        plain=("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    ),
    "qwen25": Family(
        "qwen25", ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|im_end|>", plain=("<tool_call>", "</tool_call>")
    ),
    "harmony": Family(
        "harmony",
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
        "<|return|>",
    ),
    "deepseek": Family(
        "deepseek",
        (
            "<｜begin▁of▁sentence｜>",
            "<｜end▁of▁sentence｜>",
            "<｜User｜>",
            "<｜Assistant｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁output▁begin｜>",
            "<｜tool▁output▁end｜>",
        ),
        "<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>",
        plain=("<think>", "</think>"),
    ),
    "llama3": Family(
        "llama3",
        (
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
            "<|eom_id|>",
            "<|python_tag|>",
        ),
        "<|eot_id|>",
        "<|begin_of_text|>",
    ),
    "mistral": Family(
        "mistral",
        (
            "<unk>",
            "<s>",
            "</s>",
            "[INST]",
            "[/INST]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
            "[TOOL_CALLS]",
        ),
        "</s>",
        "<s>",
        kind="first",
    ),
    "gemma": Family(
        "gemma",
        ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
        "<eos>",
        "<bos>",
        plain=("\n\n", "<table>"),
        kind="none",
    ),
    "llama2": Family("llama2", ("<unk>", "<s>", "</s>"), "</s>", "<s>", kind="every"),
    "phi3": Family(
        "phi3",
        ("<unk>", "<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "<|endoftext|>",
        rstrip=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        kind="first",
    ),
    "r1": Family(
        "r1",
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        "<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>",
        plain=("<think>", "</think>"),
    ),
    "plain": Family("plain", ("<eos>",), "<eos>"),
}


def _backend(kind: str) -> Tokenizer:
    if kind == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        tokenizer.train_from_iterator(CORPUS, trainer)
        return tokenizer
    # Trained on words, as SentencePiece learns no merge across them; then given the bytes to fall back on.
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.train_from_iterator(
        [piece for line in CORPUS for piece in line.replace(" ", " ▁").split(" ")],
        trainers.BpeTrainer(vocab_size=240, special_tokens=["<unk>"], show_progress=False),
    )
    learned = json.loads(trained.to_str())["model"]
    words = [token for token in learned["vocab"] if token != "<unk>"]
    vocab = {token: id for id, token in enumerate(["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *words])}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[tuple(pair) for pair in learned["merges"]],
            byte_fallback=True,
            fuse_unk=True,
            unk_token="<unk>",
        )
    )
    first = {"first": [decoders.Strip(" ", 1, 0)], "every": [decoders.Strip(" ", 1, 0)], "none": []}[kind]
    if kind == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        prepend = [normalizers.Prepend("▁")] if kind == "every" else []
        tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *first]
    )
    return tokenizer


@lru_cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The family's tokenizer, with its template. Shared: don't change it."""
    family = FAMILIES[name]
    backend = _backend(family.kind)
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False, rstrip=token in family.rstrip) for token in family.special]
    )
    if family.plain:
        backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.plain])
    template = Path(__file__).parent / "templates" / f"{family.template}.jinja"
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=family.eos,
        bos_token=family.bos,
        clean_up_tokenization_spaces=False,
        chat_template=template.read_text("utf-8"),
    )
