"""Generalised advantage estimation, our vectorised recurrence against a loop over positions as LightRFT has it.

    python benchmarks/gae.py [--episodes 256] [--longest 2048]

LightRFT can't be installed for this: the wheel on PyPI (0.1.0) holds no module, and it asks for vLLM, SGLang and
DeepSpeed. So its published algorithm (opendilab/LightRFT, Apache-2.0, `trainer/advantage_calculator.py`, class
`GAECalculator`) is written down again here: a Python loop over time for a padded batch, and for packed samples the same
loop once per sample. Single-turn episodes of ragged lengths, on which that algorithm and ours mean the same (between
turns its mask cuts the bootstrap); the results must agree. CPU and wall seconds, median; one thread.
"""

from __future__ import annotations

import argparse
import os

import numpy as np
import torch
from side_by_side import timed
from torch import Tensor

from tapereel.finetune import Episode, Row, Stream
from tapereel.finetune.objective import Context, TimeCredit

GAMMA, LAM = 0.99, 0.95


def looped(values: Tensor, rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(advantages, returns) of a padded batch (B, T), position by position from the end."""
    values, rewards = values * mask, rewards * mask
    later, advantage = torch.zeros(len(values)), torch.zeros(len(values))
    backwards = []
    for t in range(values.shape[1] - 1, -1, -1):
        advantage = rewards[:, t] + GAMMA * later - values[:, t] + GAMMA * LAM * advantage
        later = values[:, t]
        backwards.append(advantage)
    advantages = torch.stack(backwards[::-1], dim=1)
    return advantages, advantages + values


def looped_packed(values: list[Tensor], rewards: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The same, one sample after the other."""
    return [looped(v[None], r[None], torch.ones_like(v)[None]) for v, r in zip(values, rewards, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="shows that it runs, no more")
    args = parser.parse_args()
    if args.tiny:
        args.episodes, args.longest, args.reps = 8, 64, 2
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    lengths = rng.integers(args.longest // 8, args.longest + 1, args.episodes)
    earned = rng.random(args.episodes)
    values = [torch.from_numpy(rng.normal(size=n)).float() for n in lengths]
    rewards = [
        torch.nn.functional.pad(torch.tensor([r]).float(), (int(n) - 1, 0))
        for n, r in zip(lengths, earned, strict=True)
    ]
    pad = torch.nn.utils.rnn.pad_sequence
    mask = torch.arange(int(lengths.max()))[None] < torch.from_numpy(lengths)[:, None]
    padded = [pad(column, batch_first=True) for column in (values, rewards)]

    stream = _stream(lengths, earned).having(value=torch.cat(values))
    credit, y = TimeCredit(kind="gae", gamma=GAMMA, lam=LAM), torch.from_numpy(earned)
    found = {
        "ours": timed(lambda: credit(y, None, stream, Context()), args.reps),
        "loop, padded": timed(lambda: looped(*padded, mask.float()), args.reps),
        "loop, packed": timed(lambda: looped_packed(values, rewards), max(2, args.reps // 2)),
    }
    ours = found["ours"][2][0].float()
    for name, theirs in (
        ("padded", found["loop, padded"][2][0][mask]),
        ("packed", torch.cat([a[0] for a, _ in found["loop, packed"][2]])),
    ):
        if not torch.allclose(ours, theirs, atol=1e-4):
            raise SystemExit(f"the {name} loop and ours disagree by {float((ours - theirs).abs().max()):.3g}")
    print(
        f"{args.episodes} episodes of {lengths.min()} to {lengths.max()} tokens, {lengths.sum():,} in all, "
        f"load {os.getloadavg()[0]:.1f}\n\n| | CPU s | wall s | M tokens per CPU s | CPU / ours |"
    )
    print("|---|---|---|---|---|")
    for name, (cpu, wall, _) in found.items():
        print(f"| {name} | {cpu:.4f} | {wall:.4f} | {lengths.sum() / cpu / 1e6:.2f} | {cpu / found['ours'][0]:.1f} |")


def _stream(lengths: np.ndarray, earned: np.ndarray) -> Stream:
    rows, episodes = [], []
    for i, (n, r) in enumerate(zip(lengths, earned, strict=True)):
        zeros = np.zeros(n, np.int32)
        rows.append(
            Row(
                tape=f"t{i}",
                group=f"t{i}",
                input_ids=np.zeros(n + 1, np.int32),
                own=np.arange(1, n + 1, dtype=np.int32),
                old=np.full(n, -1, np.float32),
                temperature=np.ones(n, np.float32),
                version=zeros,
                call=zeros,
                turn=zeros,
                offset=np.arange(n, dtype=np.int32),
                calls=("c",),
                agents=("a",),
                versions=("r:0",),
            )
        )
        episodes.append(Episode(tape=f"t{i}", group=f"t{i}", reward=float(r)))
    return Stream.of(rows, episodes)


if __name__ == "__main__":
    main()
