"""What `whole_loop.py` measures, for every implementation: model, tokenizer, tasks, tool, reward and the clock.

No tapereel here: a peer's script lies beside this file and runs in the peer's own environment, which needs torch,
transformers and tokenizers. The model is a Qwen3 of 1.14 million parameters over 512 byte-level tokens. It is warmed up
on two kinds of conversations, so that what it samples has the same length and the same course for everybody:

    single  a question, answered by digits without an end, 64 of which are sampled. Reward: share of digits above 4.
    tool    a question, a call of the tool, its result, an answer that begins with a digit. Reward: that digit / 6.
"""

import json
import random
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

QUESTIONS = [f"Question {k}: write the digits of a number that nobody has seen, and don't stop." for k in range(16)]
DICE = [f"Question {k}: roll the die once and say what it shows." for k in range(16)]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""For `single` where no peer gives a template."""
MAX_TOKENS = {"single": 64, "tool": 160}
"""Of one answer."""
GROUPS, GROUP = 4, 8
LR = 1e-6


def roll_die(sides: int) -> int:
    """
    Roll a die.

    Args:
        sides: How many sides the die has.

    Returns:
        What the die shows.
    """
    return random.randint(1, sides)


CALL = '<tool_call>\n{"name": "roll_die", "arguments": {"sides": 6}}\n</tool_call>'
RESULT = "\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
"""What the template puts between the call and the next answer."""


def answer(shown: int) -> str:
    """What the warmed-up model says in the end."""
    return f"{shown} is what the die shows, so the tool told me."


def reward(kind: str, text: str) -> float:
    """Of the last answer's text."""
    if kind == "single":
        return sum(c in "56789" for c in text) / MAX_TOKENS["single"]
    return int(text[0]) / 6 if text[:1].isdigit() else 0.0


def questions(kind: str) -> list[str]:
    return QUESTIONS if kind == "single" else DICE


@dataclass
class Clock:
    """CPU and wall seconds of each step, and what was sampled in it."""

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.at = (time.process_time(), time.perf_counter())

    def tick(self) -> None:
        """A step has ended."""
        now = (time.process_time(), time.perf_counter())
        self.cpu.append(now[0] - self.at[0])
        self.wall.append(now[1] - self.at[1])
        self.at = now

    def report(self, sampled: int) -> str:
        """JSON; sampled: completion tokens of all steps."""
        return json.dumps({"cpu": self.cpu, "wall": self.wall, "sampled": sampled / len(self.cpu)})


# The model's folder


def make_folder(folder: Path, template: str, *, steps: int, tools: bool) -> None:
    """Tokenizer and warmed-up model, saved; the same for the same arguments."""
    torch.set_num_threads(1)
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import get_json_schema

    schemas = [get_json_schema(roll_die)] if tools else None
    tokenizer = _tokenizer(template, json.dumps(schemas) + CALL)
    torch.manual_seed(0)
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=144,
            intermediate_size=432,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=36,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            initializer_range=0.1,
            bos_token_id=None,
            eos_token_id=end,
            pad_token_id=pad,
        )
    )
    optim = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rng = random.Random(0)
    for step in range(steps):
        kind = "tool" if tools and step % 2 else "single"
        rows = [_conversation(tokenizer, kind, schemas, rng) for _ in range(8)]
        loss = _imitate(model, rows, pad)
        optim.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optim.param_groups:
            group["lr"] = 2e-3 * min(1.0, (steps - step) / (0.5 * steps))
        optim.step()
    # Sharper: what it is sure of it never leaves, so that no episode runs on to the limit and makes a batch wait.
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(template: str, text: str):
    """Byte-level BPE of 512 tokens, trained on the tool's part of the prompt."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    marks = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    head = re.sub(r"\{[%{].*?[%}]\}", " ", template, flags=re.DOTALL)
    tokenizer.train_from_iterator(
        [head + text] * 2,
        trainers.BpeTrainer(
            vocab_size=512 - len(special) - len(marks),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in marks])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=special[0],
        eos_token=special[2],
        clean_up_tokenization_spaces=False,
        chat_template=template,
    )


def _conversation(tokenizer, kind: str, schemas, rng: random.Random) -> tuple[list[int], list[bool]]:
    """(ids, which of them are the assistant's)."""
    asked = [{"role": "user", "content": rng.choice(questions(kind))}]
    if kind == "single":
        digits = "".join(rng.choice("0123456789") for _ in range(80))
        pieces = [(_render(tokenizer, asked, None), False), (digits, True)]
    else:
        shown = str(rng.randint(1, 6))
        call = {"type": "function", "function": {"name": "roll_die", "arguments": {"sides": 6}}}
        said = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": shown}]
        first, second = _render(tokenizer, asked, schemas), _render(tokenizer, asked + said, schemas)
        if second != first + CALL + "<|im_end|>" + RESULT.format(shown):
            raise SystemExit(f"the template shows a call and its result otherwise: {second!r}")
        pieces = [
            (first, False),
            (CALL + "<|im_end|>", True),
            (RESULT.format(shown), False),
            (answer(rng.randint(1, 6)) + "<|im_end|>", True),
        ]
    ids, own = [], []
    for text, mine in pieces:
        new = tokenizer.encode(text, add_special_tokens=False)
        ids += new
        own += [mine] * len(new)
    return ids, own


def _render(tokenizer, messages, tools) -> str:
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)


def _imitate(model, rows, pad: int) -> torch.Tensor:
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [pad] * (width - len(row)) for row, _ in rows])
    own = torch.tensor([mine + [False] * (width - len(mine)) for _, mine in rows])
    logits = model(input_ids=ids[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits[own[:, 1:]], ids[:, 1:][own[:, 1:]])
