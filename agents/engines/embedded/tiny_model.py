"""A chat model small enough for a test: a character-level tokenizer with a chat template and an untrained transformer.

The functions create the tokenizer and the model without a download. `save_pretrained` works as with any other model. A
message has only one role token, one token per character and one end token, because each token costs noticeable time on
a CPU.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from ....tapes.errors import MissingExtra, UsageError
from .pretrained import quiet_transformers

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

Size = Literal["micro", "tiny", "small", "base"]

SPECIAL = ("<|pad|>", "<|unk|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
"""Special tokens, with the ids 0 to 6. `<|end|>` ends every message, so a model samples it to end its turn."""

ALPHABET = "\n\t" + "".join(sorted(string.printable[:95]))
"""The characters that have an id, which are newline, tab and printable ASCII. All others become `<|unk|>`."""

CHAT_TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{% set f = tool['function'] or tool %}{{ f['name'] }}("
    "{{ f['parameters']['properties'] | join(', ') }}): {{ f['description'] }}\n{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] or '' }}"
    "{% if 'tool_calls' in m %}{% for call in m['tool_calls'] or () %}{% set f = call['function'] or call %}"
    '<tool_call>{"name": {{ f[\'name\'] | tojson }}, "arguments": '
    "{{ f['arguments'] if f['arguments'] is string else f['arguments'] | tojson }}}</tool_call>"
    "{% endfor %}{% endif %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_SHAPES: dict[str, tuple[int, int, int, int]] = {
    "micro": (32, 2, 2, 64),
    "tiny": (64, 2, 4, 160),
    "small": (96, 3, 4, 256),
    "base": (128, 4, 4, 320),
}
"""(Width, layers, heads, feed-forward width) of each size."""


def char_tokenizer(alphabet: str = ALPHABET) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the special tokens and one token per character of `alphabet`. Its chat template shows
    tools."""
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise MissingExtra(error.name or "transformers", "train", "the character-level tokenizer") from None
    vocab = {token: id for id, token in enumerate([*SPECIAL, *dict.fromkeys(alphabet)])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<|unk|>"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        eos_token="<|end|>",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def tiny_model(
    tokenizer: PreTrainedTokenizerFast, size: Size = "small", *, seed: int = 0, context: int = 512
) -> LlamaForCausalLM:
    """Return an untrained float32 Llama with tied embeddings. Equal arguments give equal models.

    With `char_tokenizer`, micro has 24 k parameters, tiny 0.10 M, small 0.34 M and base 0.77 M.
    """
    try:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise MissingExtra(error.name or "torch", "train", "the tiny model") from None
    if size not in _SHAPES:
        raise UsageError(f"size={size!r} must be one of {', '.join(_SHAPES)}")
    width, layers, heads, feed_forward = _SHAPES[size]
    end, pad = cast(int, tokenizer.eos_token_id), cast(int, tokenizer.pad_token_id)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=feed_forward,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
        # With the usual 0.02, a model this narrow would spend its first hundred updates on growing its weights.
        initializer_range=0.1,
    )
    # fork_rng restores the global generator, so a new model doesn't change the caller's random numbers.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % 2**64)
        model = LlamaForCausalLM(config)
    assert model.generation_config is not None
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = end, pad
    return model.eval()


def save_tiny(
    folder: str | Path, alphabet: str = ALPHABET, *, size: Size = "small", seed: int = 0, context: int = 512
) -> None:
    """Save a tiny model and its tokenizer in `folder`, in Hugging Face format."""
    tokenizer = char_tokenizer(alphabet)
    model = tiny_model(tokenizer, size, seed=seed, context=context)
    with quiet_transformers():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
