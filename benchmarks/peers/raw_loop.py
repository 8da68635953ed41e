"""The raw cost of `whole_loop.py`: `generate()`, the GRPO loss, backward, clipping and AdamW, and nothing else.

Arguments: the model's folder, `single` or `tool`, steps. Runs in any environment with torch and transformers, so that
the raw cost is measured with the libraries that each side uses.
"""

import itertools
import random
import sys

import torch
from loop_case import GROUP, GROUPS, LR, MAX_TOKENS, RESULT, Clock, questions, reward, roll_die
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import get_json_schema


def main(folder: str, kind: str, steps: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optim = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    tools = [get_json_schema(roll_die)] if kind == "tool" else None
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": q}], tools=tools, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        for q in questions(kind)
    ]
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    order = itertools.cycle(prompts)
    clock, sampled = Clock(), 0
    for _ in range(steps):
        asked = list(itertools.islice(order, GROUPS))
        rows = [(list(prompt), [False] * len(prompt)) for prompt in asked for _ in range(GROUP)]
        texts = generate(model, tokenizer, rows, range(len(rows)), kind, end, pad)
        if kind == "tool":
            called = [i for i, text in enumerate(texts) if "</tool_call>" in text]
            for i in called:
                new = tokenizer.encode(RESULT.format(roll_die(6)), add_special_tokens=False)
                rows[i] = (rows[i][0] + new, rows[i][1] + [False] * len(new))
            for i, text in zip(called, generate(model, tokenizer, rows, called, kind, end, pad), strict=True):
                texts[i] = text
        sampled += sum(sum(own) for _, own in rows)
        update(model, optim, rows, torch.tensor([reward(kind, text) for text in texts]), pad)
        clock.tick()
    print(clock.report(sampled))


def generate(model, tokenizer, rows, which, kind: str, end: int, pad: int) -> list[str]:
    """Lengthens those rows by an answer each; gives the answers' texts."""
    ids = [rows[i][0] for i in which]
    width = max(map(len, ids))
    padded = torch.tensor([[pad] * (width - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    model.eval()
    with torch.no_grad():
        out = model.generate(
            input_ids=padded,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=MAX_TOKENS[kind],
            eos_token_id=end,
            pad_token_id=pad,
        )[:, width:].tolist()
    texts = []
    for i, new in zip(which, out, strict=True):
        new = new[: new.index(end) + 1] if end in new else new
        rows[i] = (rows[i][0] + new, rows[i][1] + [True] * len(new))
        texts.append(tokenizer.decode(new, skip_special_tokens=True))
    return texts


def update(model, optim, rows, rewards: torch.Tensor, pad: int) -> None:
    """One GRPO step on policy: ratio 1, standard scores within each group, mean over own tokens."""
    model.train()
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [pad] * (width - len(row)) for row, _ in rows])
    own = torch.tensor([mine + [False] * (width - len(mine)) for _, mine in rows])[:, 1:]
    grouped = rewards.view(GROUPS, GROUP)
    scores = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    advantage = scores.reshape(-1, 1)
    lp = model(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    ratio = (lp - lp.detach()).exp()
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)[own].mean()
    optim.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optim.step()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
