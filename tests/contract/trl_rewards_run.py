"""Run by the Python of the TRL environment: `trl_rewards_run.py OUT`. What a reward function gets from TRL and from
`TRLEnvironment`, for the same rows and the same answers of the model.

OUT/seen.json has for each case the arguments of both, as {"trl": ..., "ours": ...}, the scores of each function and the
weighted reward.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_instruct_2507_chat_template
from trl.rewards import get_soft_overlong_punishment, think_format_reward

from tapereel.agents import ChatAgent, ScriptedEngine, rollout
from tapereel.agents.engines.embedded import char_tokenizer
from tapereel.agents.engines.embedded.tiny_model import tiny_model
from tapereel.agents.rendering import Renderer
from tapereel.envs.adapters import TRLEnvironment, trl_row
from tapereel.tapes import Answer, ToolCalls

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
OPEN = "<think>hm"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2?"}]
TRLS = [think_format_reward, get_soft_overlong_punishment(32, 16), get_soft_overlong_punishment(48, 16)]
"""Functions of TRL for prompts of messages. Two have one name."""
WEIGHTS = [2.0, 0.5, 1.0, 0.5, 0.25]
CASES = {
    "text": ("1+2?", None, ["It is 3."]),
    "text with thoughts": ("1+2?", None, ["<think>\nhm\n</think>\n\n3"]),
    "text, no answer": ("1+2?", None, [""]),
    "chat": (CHAT, None, [" 3 "]),
    "chat with thoughts": (CHAT, None, ["<think>\nhm\n</think>\n\n3"]),
    "a call": (CHAT, "", [CALL, "3"]),
    "a call after text": (CHAT, "", ["Let me think. " + CALL, "It is 3."]),
    "a call after thoughts": (
        CHAT,
        " Use the tool.",
        ["<think>\nhm\n</think>\n\n" + CALL, "<think>\nso\n</think>\n\n3"],
    ),
    "thoughts, text, two calls": (CHAT, None, ["<think>hm</think>\nBoth: " + CALL + "\n" + CALL, "3"]),
    "words after the call": (CHAT, None, [CALL + "\nDone.", "3"]),
    "no call": (CHAT, None, ["<think>\n\n</think>\n\n3"]),
    "thoughts without an end": (CHAT, None, [OPEN]),
    "a broken call": (CHAT, "", ["I add. <tool_call>{bad</tool_call>"]),
    "a broken call after a good one": (CHAT, "", [CALL, "<think>hm</think>\n\n<tool_call>{bad</tool_call>"]),
}
"""Prompt, what `reset` adds to it, and the answers."""
ONE_TURN = ("text", "chat")
"""The cases with such a name have no tools."""


class Calc:
    addition = None

    def reset(self, **row):
        return type(self).addition

    def add(self, a: int, b: int) -> int:
        """
        Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b


def functions(seen: dict, row: dict) -> list:
    def first(prompts, completions, completion_ids, **columns):
        seen.update(prompts=prompts[0], completions=completions[0], completion_ids=completion_ids[0])
        seen.update({key: columns[key][0] for key in row if key != "prompt"})
        return [0.25] * len(prompts)

    async def second(completions, **columns):
        return [None] * len(completions)

    return [first, second, *(() if isinstance(row["prompt"], str) else TRLS)]


def theirs(out: Path, tokenizer, row, answers, tools: bool) -> dict:
    seen = {}
    left = iter(answers)

    class Scripted(GRPOTrainer):
        """Answers what the case says."""

        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            said = next(left)
            ids = tokenizer(said, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] * (said != OPEN)
            return [list(ids) for _ in prompt_ids], None

    rewards = functions(seen, row)
    args = GRPOConfig(
        output_dir=str(out),
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=400,
        reward_weights=WEIGHTS[: len(rewards)],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Scripted(
        model=tiny_model(tokenizer, "micro", context=2048),
        args=args,
        train_dataset=Dataset.from_list([row]),
        processing_class=tokenizer,
        reward_funcs=rewards,
        environment_factory=Calc if tools else None,
    )
    scored = trainer._calculate_rewards

    def noted(*given):
        found = scored(*given)
        seen["scores"] = [None if one != one else round(one, 6) for one in found[0].tolist()]
        seen["reward"] = round(float((found[0] * trainer.reward_weights).nansum()), 6)
        return found

    trainer._calculate_rewards = noted
    trainer._generate_and_score_completions([dict(row), dict(row)])
    return seen


def ours(tokenizer, row, answers, tools: bool) -> dict:
    seen = {}
    rewards = functions(seen, row)
    agent = ChatAgent(actions=[ToolCalls], plain=Answer, misreads=0)  # an answer that can't be read is the last one
    engine = ScriptedEngine(answers, renderer=Renderer(tokenizer))
    env = TRLEnvironment(Calc if tools else None, rewards=rewards, reward_weights=WEIGHTS[: len(rewards)])
    tape = asyncio.run(rollout(agent, env, trl_row(row), engine=engine))
    if tape.cause is not None and tape.cause.error != "TooManyParseErrors":
        raise RuntimeError(str(tape.cause))
    found = {reward.name: round(reward.value, 6) for reward in tape.rewards}
    return {**seen, "scores": [found.get(name) for name in env.rewards.names], "reward": round(tape.reward, 6)}


def main(out: Path) -> None:
    torch.set_num_threads(1)
    found = {}
    for name, (prompt, addition, answers) in CASES.items():
        tools = not name.startswith(ONE_TURN)
        Calc.addition = addition
        tokenizer = char_tokenizer()
        tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
        tokenizer.chat_template = qwen3_instruct_2507_chat_template
        row = {"prompt": prompt, "answer": "3", "hint": None}
        both = {"trl": theirs(out, tokenizer, row, answers, tools), "ours": ours(tokenizer, row, answers, tools)}
        if OPEN in answers:  # the scripted engine ends each answer
            both["ours"]["completion_ids"].remove(tokenizer.eos_token_id)
        found[name] = both
    (out / "seen.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
