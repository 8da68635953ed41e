"""Counts of work that don't depend on how busy the machine is, compared with `counts.json`.

    python benchmarks/counts.py
    python benchmarks/counts.py --write

Python's calls are counted with `sys.setprofile`, functions in C included: per turn of an episode, per record that
`verify` checks, and per request of the embedded engine. Tokens are those that the engine prefills and recomputes.
Passes are operations of torch on a chunk of logits in the output layer's loss and gradient.
`tests/front/test_counts.py` compares in the default suite.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tempfile
from array import array
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

HERE = Path(__file__).resolve().parent
TABLE = HERE / "counts.json"
SLACK = 0.03
"""A count may differ from the table by this part."""
PACKAGE = tuple(f"{HERE.parent}/{floor}/" for floor in ("tapes", "envs", "agents", "finetune", "cli"))
"""Where this package's code is. The packages of an environment inside the checkout aren't its code."""


def calls(work: Callable[[], object], *, ours: bool = False) -> int:
    """Python's calls in `work`, after a run that isn't counted. With `ours`, only calls to and from this package: the
    event loop's own calls depend on when another thread is ready."""
    work()
    found = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal found
        if event not in ("call", "c_call"):
            return
        caller = frame if event == "c_call" else frame.f_back
        if (
            not ours
            or frame.f_code.co_filename.startswith(PACKAGE)
            or (caller is not None and caller.f_code.co_filename.startswith(PACKAGE))
        ):
            found += 1

    gc.collect()
    gc.disable()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


def turns() -> dict[str, float]:
    """Calls per turn: episodes of 1, 5 and 50 turns in memory, and of 1 and 5 into a store."""
    from paired import episodes

    found = {
        f"calls per turn in memory, episodes of {n}": calls(episodes(n, 64 // n + 1)) / (64 // n + 1) / n
        for n in (1, 5, 50)
    }
    for n in (1, 5):
        stored = calls(episodes(n, 64 // n + 1, store=True), ours=True)
        found[f"calls per turn into a store, episodes of {n}"] = stored / (64 // n + 1) / n
    return found


def verified() -> dict[str, float]:
    """Calls per record that `verify` checks, in a run of 200 episodes of one turn."""
    from paired import rolled

    from tapereel.tapes.store.store import Store
    from tapereel.tapes.store.verifier import verify

    with tempfile.TemporaryDirectory() as folder:
        with Store.create(Path(folder) / "run") as store:
            asyncio.run(rolled(1, 200, store.writer))
        records = sum(len(list(path.open("rb"))) for path in (Path(folder) / "run" / "tapes").glob("*.jsonl"))
        return {"calls per record, verify": calls(lambda: verify(Path(folder) / "run")) / records}


def tokens() -> dict[str, float]:
    """Tokens that the embedded engine computes for 4 groups of 8 that share a prompt, each with 24 sampled tokens."""
    import torch
    from embedded_engine import NoText
    from shared_prefix import policy

    from tapereel.agents import Request
    from tapereel.agents.engines.embedded.embedded_engine import EmbeddedEngine
    from tapereel.tapes.records import Sampling

    async def run(prompt: int, sync: bool) -> Any:
        model = policy()
        engine = EmbeddedEngine(model, NoText(), version="v0", slots=32, capacity=512)
        rng = torch.Generator().manual_seed(1)
        prompts = [array("i", torch.randint(0, 104, (prompt,), generator=rng).tolist()) for _ in range(4)]
        asked = [
            Request(messages=(), prompt=ids, sampling=Sampling(max_tokens=24, ignore_eos=True), seed=8 * k + j)
            for k, ids in enumerate(prompts)
            for j in range(8)
        ]
        jobs = [asyncio.ensure_future(engine.complete(request)) for request in asked]
        if sync:
            while engine.stats.sampled < 200:  # noqa: ASYNC110
                await asyncio.sleep(0)
            await engine.sync_weights(dict(model.state_dict()), "v1", "reprefill")
        await asyncio.gather(*jobs)
        await engine.close()
        return engine.stats

    found: dict[str, float] = {}
    for prompt in (64, 350):
        found[f"tokens prefilled, 4 groups of 8, prompt of {prompt}"] = asyncio.run(run(prompt, False)).prefilled
        stats = asyncio.run(run(prompt, True))
        found[f"tokens recomputed after a sync, prompt of {prompt}"] = stats.recomputed
    return found


def admitted() -> dict[str, float]:
    """Calls per request of the embedded engine: 64 prompts that begin alike, with two sampled tokens each."""
    import torch
    from embedded_engine import NoText
    from shared_prefix import policy

    from tapereel.agents import Request
    from tapereel.agents.engines.embedded.embedded_engine import EmbeddedEngine
    from tapereel.tapes.records import Sampling

    own = torch.randint(0, 104, (64, 8), generator=torch.Generator().manual_seed(1)).tolist()
    asked = [
        Request(messages=(), prompt=array("i", [*range(32), *ids]), sampling=Sampling(max_tokens=2), seed=seed)
        for seed, ids in enumerate(own)
    ]

    async def run() -> None:
        engine = EmbeddedEngine(policy(), NoText(), version="v0", slots=64, capacity=64)
        await asyncio.gather(*(engine.complete(request) for request in asked))
        await engine.close()

    return {"calls per request, embedded engine, 64 prompts": calls(lambda: asyncio.run(run()), ours=True) / 64}


def passes() -> dict[str, float]:
    """Operations on a chunk of logits, per chunk: loss and gradient in one pass, and log-probs with their gradient."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from tapereel.finetune.trainer import lm_head

    rows, vocabulary = 2 * lm_head.CHUNK_ROWS, lm_head.CHUNK // lm_head.CHUNK_ROWS
    views = ("view", "slice", "select", "unsqueeze", "expand", "transpose", "aten.t.", "detach", "alias", "empty")

    class Count(TorchDispatchMode):
        found = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            every = [*args, *(kwargs or {}).values(), *(out if isinstance(out, tuple) else (out,))]
            shapes = [tuple(one.shape) for one in every if isinstance(one, torch.Tensor)]
            logits = any(len(shape) == 2 and shape[1] == vocabulary and shape[0] > 8 for shape in shapes)
            self.found += logits and not any(view in str(func) for view in views)
            return out

    found: dict[str, float] = {}
    for name in ("loss_in_one_pass", "log_probs"):
        hidden, weight = torch.randn(rows, 8, requires_grad=True), torch.randn(vocabulary, 8, requires_grad=True)
        inputs = hidden, weight, None, torch.zeros(rows, dtype=torch.int64), torch.ones(rows)
        with Count() as count:
            if name == "log_probs":
                lm_head.log_probs(*inputs)[0].sum().backward()
            else:
                lm_head.loss_in_one_pass(*inputs, lambda lp, at: lp.sum())[1].backward()
        found[f"passes over a chunk of logits, {name}"] = count.found / 2
    return found


def measure() -> dict[str, float]:
    """Every count, by name."""
    return {name: round(n, 1) for part in (turns, verified, admitted, tokens, passes) for name, n in part().items()}


def differences(now: dict[str, float], table: dict[str, float]) -> list[str]:
    """What differs from the table by more than SLACK, and counts that only one of them has."""
    alone = [f"{name} is only in {'the table' if name in table else 'the measurement'}" for name in now.keys() ^ table]
    return sorted(alone) + [
        f"{name}: {n:g} instead of {table[name]:g} ({n / table[name]:.3f})"
        for name, n in now.items()
        if name in table and abs(n - table[name]) > SLACK * table[name]
    ]


def main() -> int:
    """Print the counts, and compare them with the table or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table")
    args = parser.parse_args()
    now = measure()
    print("| count | now |\n|---|---|")
    for name, n in now.items():
        print(f"| {name} | {n:,.1f} |")
    if args.write:
        TABLE.write_text(json.dumps(now, indent=2) + "\n")
        return 0
    wrong = differences(now, json.loads(TABLE.read_text()))
    for line in wrong:
        print(f"{line}\n  If it is meant, write the table again: python benchmarks/counts.py --write", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parents[1]), str(HERE)]
    sys.exit(main())
