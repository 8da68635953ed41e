"""One RL update: ours against cross-entropy over whole logits, TapeAgents' `rl_step` and TorchRL's `GRPOLoss`.

    python benchmarks/rl_update.py                                     # ours, own and plain
    python benchmarks/rl_update.py --tapeagents PYTHON --torchrl PYTHON [--vocabulary 152000 --rows 2]

A two-layer Llama of width 128, one thread, float32; half of each row's tokens are the agent's own (the case is in
`peers/update_case.py`). An update is forward, loss, backward, clipping of the gradient norm and AdamW. Every
implementation runs in a process of its own, in turn, `--rounds` times; each must report the same loss. Printed: median
seconds of CPU and of wall, the process's peak above what it held before the first update, and ratios to ours of the
same round.

    ours        Trainer.update with the recipe grpo: own positions only, the vocabulary in chunks
    own         logits of the agent's own positions in one piece, cross-entropy, clipped loss, backward
    plain       logits of every position in float32, log_softmax, gather, clipped loss, backward
    tapeagents  python -m venv ta; ta/bin/pip install torch==2.13.0 tapeagents==0.1.16 transformers==4.51.3
                "wandb~=0.19" peft==0.12 "datasets~=2.21.0" "numpy~=1.26" accelerate==1.7.0 "pyarrow<19"
    torchrl     python -m venv torchrl; torchrl/bin/pip install torch==2.13.0 torchrl transformers
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from peers.update_case import LR, TURN, Case
from peers.update_case import main as measure_and_print
from side_by_side import Found, in_turn, ratio, same_loss

HERE = Path(__file__).parent


def ours(case: Case) -> Callable[[], float]:
    """An update through the library's own trainer."""
    from tapereel.finetune.data.rows import Row
    from tapereel.finetune.data.stream import Episode
    from tapereel.finetune.recipes import get_recipe
    from tapereel.finetune.trainer.options import OptimiserConfig
    from tapereel.finetune.trainer.trainer import Trainer

    ids, rewards = case.ids().astype(np.int32), case.rewards()
    own = np.flatnonzero(case.own()).astype(np.int32)
    n, calls = len(own), (own // (2 * TURN)).astype(np.int32)
    names = int(calls.max()) + 1
    rows = [
        Row(
            tape=f"t{i}",
            group="g",
            input_ids=ids[i],
            own=own,
            old=np.full(n, case.old(), np.float32),
            temperature=np.ones(n, np.float32),
            version=np.zeros(n, np.int32),
            call=calls,
            turn=calls,
            offset=(np.arange(n) % TURN).astype(np.int32),
            calls=tuple(f"c{k}" for k in range(names)),
            agents=("a",) * names,
            versions=("r:0",),
        )
        for i in range(case.rows)
    ]
    episodes = [Episode(tape=f"t{i}", group="g", reward=float(rewards[i])) for i in range(case.rows)]
    trainer = Trainer(case.model(), get_recipe("grpo"), OptimiserConfig(lr=LR))

    def update() -> float:
        stats = trainer.update(rows, episodes)
        if not stats.applied:
            raise RuntimeError(f"the update was skipped ({stats.skipped}): there is nothing to time")
        return stats.loss

    return update


def table(found: Found) -> str:
    """Markdown: medians, and the medians of the rounds' ratios to ours."""
    lines = ["| | CPU s | wall s | MiB | CPU / ours | wall / ours | memory / ours |", "|---|---|---|---|---|---|---|"]
    for name, several in found.items():
        values = [statistics.median(one[key] for one in several) for key in ("cpu", "wall", "mib")]
        ratios = [ratio(several, found["ours"], key) for key in ("cpu", "wall", "mib")]
        lines.append(
            f"| {name} | {values[0]:.2f} | {values[1]:.2f} | {values[2]:,.0f} | "
            + " | ".join(f"{one:.2f}" for one in ratios)
            + " |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("vocabulary", 32_000), ("rows", 8), ("length", 1024), ("reps", 3), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tapeagents", metavar="PYTHON")
    parser.add_argument("--torchrl", metavar="PYTHON")
    parser.add_argument("--tiny", action="store_true", help="seconds instead of minutes: shows that it runs, no more")
    args = parser.parse_args()
    if args.tiny:
        args.vocabulary, args.rows, args.length, args.reps, args.rounds = 500, 2, 256, 2, 1
    shape = [str(n) for n in (args.vocabulary, args.rows, args.length, args.reps)]
    commands = {
        "ours": [sys.executable, __file__, "ours"],
        **{name: [sys.executable, str(HERE / "peers" / f"{name}_update.py")] for name in ("own", "plain")},
    }
    for name in ("tapeagents", "torchrl"):
        if python := getattr(args, name):
            commands[name] = [python, str(HERE / "peers" / f"{name}_update.py")]
    found = in_turn({name: [*command, *shape] for name, command in commands.items()}, args.rounds)
    print(
        f"vocabulary {args.vocabulary:,}, {args.rows} x {args.length} tokens, {args.rounds} rounds, "
        f"loss {same_loss(found, 1e-5):.6f}, load {os.getloadavg()[0]:.1f}\n\n{table(found)}"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["ours"]:
        del sys.argv[1]
        measure_and_print(ours)
    else:
        main()
