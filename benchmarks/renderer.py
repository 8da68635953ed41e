"""What a turn costs in the renderer, against transformers encoding the whole conversation anew each turn.

    python benchmarks/renderer.py

Microseconds for the prompt of turn 1, 10 and 50 of one episode (a question of 200 characters and a sampled answer of
100 a turn), one thread, best of five episodes. `whole` is `apply_chat_template(tokenize=True)`.
"""

from __future__ import annotations

import time
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tapereel.agents.engines.embedded import char_tokenizer
from tapereel.agents.rendering import Renderer, Track

TURNS = (1, 10, 50)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = CHATML.replace("m['content'] }}", "m['content'].split('</think>')[-1] }}")
SENTENCE = "The quick brown fox asks what 47 times 83 is; the answer, naively, is 3901. "


def byte_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 400 ids."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([SENTENCE], trainer)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template)


def episode(tokenizer: PreTrainedTokenizerFast, *, answer: str, splice: bool) -> dict[int, float]:
    """Microseconds of the prompt of each turn in TURNS."""
    renderer = Renderer(tokenizer)
    answer_ids = [*tokenizer.encode(answer, add_special_tokens=False), renderer.end_ids[0]]
    messages: list[dict[str, Any]] = []
    tracks: list[Track] = []
    spent: dict[int, float] = {}
    for turn in range(1, max(TURNS) + 1):
        messages.append({"role": "user", "content": f"{turn} {SENTENCE * 3}"[:200]})
        reply = {"role": "assistant", "content": answer}
        started = time.perf_counter()
        if splice:
            rendered = renderer.prompt(messages, None, tracks)
            tracks = [renderer.track(rendered, call=str(turn), reply=reply, completion=answer_ids)]
            assert rendered.split is None
        else:
            tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
        if turn in TURNS:
            spent[turn] = (time.perf_counter() - started) * 1e6
        messages.append(reply)
    return spent


def main() -> None:
    plain, thought = (SENTENCE * 2)[:100], "<think>" + SENTENCE[:40] + "</think>" + SENTENCE[:46]
    for name, tokenizer, answer in (
        ("characters", char_tokenizer(), plain),
        ("byte-level BPE", byte_tokenizer(CHATML), plain),
        ("BPE, thinking stripped", byte_tokenizer(THINKING), thought),
    ):
        for splice in (True, False):
            runs = [episode(tokenizer, answer=answer, splice=splice) for _ in range(6)][1:]
            best = {turn: min(run[turn] for run in runs) for turn in TURNS}
            cells = "  ".join(f"turn {turn}: {us:7.0f} us" for turn, us in best.items())
            print(f"{name:24} {'spliced' if splice else 'whole':8} {cells}")


if __name__ == "__main__":
    main()
