"""GRPO from the bottom up: one file, one loop, plain torch. A tiny model learns to find a number by asking.

Tapereel records the episodes and turns tapes into rows; sampling, the loss, the optimiser and the loop are written out
here, to read and to take apart. The game: the environment thinks of a digit, the model says one, and hears "<" (mine is
lower), ">" (mine is higher), until it is right or has had four tries. Blind guesses are right in 4 of 10 games; asking
well, a player finds every one.

    python examples/flat_grpo.py                 # minutes on one core: mean reward 0.1 -> above 0.9
    python examples/flat_grpo.py --tiny          # a few seconds: shows that it runs

The same in `tapereel train` is asynchronous, durable and resumable; this is what it does at heart.
"""

import argparse
import asyncio
import random
from array import array

import numpy as np
import torch
from torch import Tensor, nn

from tapereel.agents import Completion, EpisodeSpec, Request, agent, rollout
from tapereel.agents.engines.embedded.tiny_model import char_tokenizer, tiny_model
from tapereel.agents.rendering.renderer import Renderer
from tapereel.envs import Environment, Outcome
from tapereel.finetune import Row, rows
from tapereel.tapes import Action, Observation, Sampling, Tape

# The game


class Hint(Observation):
    text: str


class Guess(Action):
    text: str


class FindDigit(Environment[Guess]):
    """The task is the secret digit."""

    async def reset(self, task: int) -> Hint:
        self.secret, self.tries = task, 0
        return Hint(text="?")

    async def step(self, action: Guess) -> Outcome:
        self.tries += 1
        if action.text == str(self.secret):
            return Outcome(reward=1.0, terminated=True)
        hint = ("<" if self.secret < int(action.text) else ">") if action.text.isdigit() else "?"
        return Outcome(Hint(text=hint), reward=0.0, terminated=self.tries == 4)


@agent
async def player(tape, llm):
    yield Guess(text=(await llm(tape)).text)


# Sampling: an engine is whatever completes a request


class BatchedEngine:
    """Samples one token for each request. Those that come in one turn of the event loop are one forward pass."""

    name = "flat"
    context = None
    can = frozenset()

    def __init__(self, model: nn.Module, renderer: Renderer) -> None:
        self.model, self.renderer, self.version = model, renderer, 0
        self.waiting: list[tuple[Request, asyncio.Future[Completion]]] = []

    async def complete(self, request: Request) -> Completion:
        loop = asyncio.get_running_loop()
        if not self.waiting:
            loop.call_soon(self.answer)  # behind every episode that is ready now
        future: asyncio.Future[Completion] = loop.create_future()
        self.waiting.append((request, future))
        return await future

    def answer(self) -> None:
        waiting, self.waiting = self.waiting, []
        with torch.no_grad():
            logprobs = last_logprobs(self.model, [list(request.prompt or ()) for request, _ in waiting])
        for (request, future), row in zip(waiting, logprobs, strict=True):
            # The episode's own seed: the same game is sampled the same way whoever plays beside it.
            token = int(torch.multinomial(row.exp(), 1, generator=torch.Generator().manual_seed(request.seed)))
            future.set_result(
                Completion(
                    text=self.renderer.decode([token]),
                    ids=array("i", [token]),
                    logprobs=array("f", [float(row[token])]),
                    spans=((f"flat:{self.version}", 0, 1),),
                    finish="length",
                )
            )

    def forget(self, cache_key: str) -> None:
        pass

    async def close(self) -> None:
        pass


def pad(sequences: list[list[int]]) -> Tensor:
    """(B, L) ids, zeros to the right: with causal attention nothing before them sees them."""
    return nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in sequences], batch_first=True)


def last_logprobs(model: nn.Module, prompts: list[list[int]]) -> Tensor:
    """(B, V) log-probs of the token after each prompt."""
    ends = torch.tensor([len(prompt) - 1 for prompt in prompts])
    logits = model(input_ids=pad(prompts)).logits[torch.arange(len(prompts)), ends]
    return logits.float().log_softmax(-1)


# From tapes to a gradient


def advantages(tapes: list[Tape]) -> list[float]:
    """How much better than its group each episode did, in standard deviations; 0 where all did the same."""
    rewards = np.array([tape.reward for tape in tapes], dtype=np.float64)
    spread = rewards.std(ddof=1) if len(rewards) > 1 else 0.0
    return [0.0] * len(tapes) if spread == 0 else list((rewards - rewards.mean()) / spread)


def grpo_loss(model: nn.Module, batch: list[tuple[Row, float]], clip: float = 0.2) -> Tensor:
    """-mean over all own tokens of min(ratio A, clip(ratio) A), where ratio = pi(token) / pi_sampled(token)."""
    ids = pad([row.input_ids.tolist() for row, _ in batch])
    logprobs = model(input_ids=ids[:, :-1]).logits.float().log_softmax(-1)
    total, count = torch.zeros(()), 0
    for k, (row, advantage) in enumerate(batch):
        own = torch.from_numpy(row.own).long()
        now = logprobs[k, own - 1, ids[k, own]]  # the token at position p is predicted at p - 1
        ratio = (now - torch.from_numpy(row.old)).exp()
        total = total - torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).sum()
        count += len(own)
    return total / count


# The loop


def groups_of(engine: BatchedEngine, groups: int, size: int, seed: int) -> list[list[Tape]]:
    """Play: `groups` secrets, `size` games for each, all at once."""

    rng = random.Random(seed)
    secrets = [rng.randrange(10) for _ in range(groups)]

    async def play() -> list[Tape]:
        return await asyncio.gather(
            *(
                rollout(
                    player,
                    FindDigit,
                    EpisodeSpec.of(
                        secrets[g],
                        seed=rng.getrandbits(32),
                        group=f"{seed}/{g}",
                        attempt=k,
                        sampling=Sampling(max_tokens=1),
                    ),
                    engine=engine,
                )
                for g in range(groups)
                for k in range(size)
            )
        )

    tapes = asyncio.run(play())
    return [tapes[g * size : (g + 1) * size] for g in range(groups)]


def train(updates: int, groups: int, size: int, *, model_size: str, lr: float = 1e-3, seed: int = 0) -> list[float]:
    """The mean reward of each update's games."""
    torch.manual_seed(seed)
    tokenizer = char_tokenizer("0123456789?<>")
    model = tiny_model(tokenizer, model_size, seed=seed, context=32)
    engine = BatchedEngine(model, Renderer(tokenizer))
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
    means: list[float] = []
    for update in range(updates):
        played = groups_of(engine, groups, size, seed=seed * 1_000_003 + update)
        batch = [
            (row, advantage)
            for group in played
            for tape, advantage in zip(group, advantages(group), strict=True)
            if advantage
            for row in rows(tape)
        ]
        if batch:
            optimiser.zero_grad()
            grpo_loss(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            engine.version += 1
        games = [tape for group in played for tape in group]
        means.append(sum(tape.reward for tape in games) / len(games))
        turns = sum(tape.turns for tape in games) / len(games)
        print(f"update {update + 1:3d}  reward {means[-1]:.3f}  tries {turns:.2f}", flush=True)
    return means


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--updates", type=int, default=150)
    arguments.add_argument("--tiny", action="store_true", help="few and small updates, to see that it runs")
    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    if chosen.tiny:
        train(min(chosen.updates, 5), groups=4, size=4, model_size="micro")
    else:
        train(chosen.updates, groups=16, size=16, model_size="tiny")
