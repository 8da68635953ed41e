"""What a demo leaves to read: reward.png, report.html, and the table that is printed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..tapes.rundir import METRICS, RunDir
from .curves import reward_curve
from .plots import plot_curve
from .report import Fact, Plot, ReportData, Score, TapePage, tape_page
from .run_report import Reporter, checks, command, reward_plot
from .run_report import next_commands as next_of_any

if TYPE_CHECKING:
    from .demo import Demo


_PARTS = ("demonstrations", "restore", "sft", "evaluation", "rl", "controls")
"""Of the wall-clock time, one after the other; the engine's and the trainer's seconds lie inside `rl`."""


def reporter(demo: Demo, run: RunDir) -> Reporter:
    """The report of a demo: that of any training run, and what only a demo knows once it is through."""

    def complete(data: ReportData) -> ReportData:
        return complete_report(demo, data)

    return Reporter(
        run,
        f"Tapereel demo: {demo.config.algo}, seed {demo.config.seed}",
        demo.config.algo.upper(),
        demo.config.loop.updates,
        demo.config.loop.checkpoint_every,
        complete=complete,
    )


def complete_report(demo: Demo, data: ReportData) -> ReportData:
    """Write reward.png; gives the page of the whole demo."""
    plot = demo_plot(demo)
    plot_curve(demo.out / "reward.png", plot.curves, levels=plot.levels, title=plot.title, ylabel=plot.ylabel)
    summary = demo.summary()
    held = summary["held_out"]
    books = demo.results["books"]
    return data.model_copy(
        update={
            "subtitle": "A tiny chat model learns to add three numbers with a calculator: imitation, then its own "
            "rollouts.",
            "facts": (
                Fact(
                    label="held-out reward, sampled",
                    value=f"{_show(held['before'])} → {_show(held['after'])}",
                    note=f"{held['n']} tasks, none of them trained on",
                ),
                Fact(label="greedy", value=f"{_show(held['greedy_before'])} → {_show(held['greedy_after'])}"),
                Fact(label="seconds", value=f"{summary['seconds']['total']:.0f}"),
                Fact(label="episodes on tape", value=f"{books['begun']:,}"),
            ),
            "plots": (plot, *(other for other in data.plots if other.small)),
            "scores": scores(demo),
            "seconds": {part: summary["seconds"][part] for part in _PARTS if part in summary["seconds"]},
            "tapes": pages(demo),
            "next": (*next_of_any(str(demo.out)), _lab(demo)),
        }
    )


def demo_plot(demo: Demo) -> Plot:
    """Reward per update, with the held-out levels and the control."""
    shuffled = demo.out / "controls" / "shuffled" / METRICS
    others = [reward_curve("control: shuffled rewards", shuffled)] if shuffled.exists() else []
    return reward_plot(demo.config.algo.upper(), demo.out / METRICS, demo.results, others=others)


def scores(demo: Demo) -> tuple[Score, ...]:
    """The table: before, after, and the controls."""
    r = demo.results
    rows = [("after imitation (before RL)", r["before"], ""), ("after RL", r["after"], "")]
    for name, part in (r.get("controls") or {}).items():
        title = {"sft": "control: SFT only", "shuffled": "control: rewards shuffled within groups"}[name]
        rows.append((title, part, f"{part['trained_tokens']:,} trained tokens"))
    return tuple(
        Score(
            name=name,
            sampled=part["sampled"]["mean"],
            greedy=part["greedy"]["mean"],
            n=part["sampled"]["n"],
            note=note or _partial_credit(part),
        )
        for name, part, note in rows
        if part
    )


def next_commands(demo: Demo) -> tuple[str, ...]:
    """Things to try on this very run."""
    run = str(demo.out)
    return (*next_of_any(run), *checks(run), _lab(demo))


def _lab(demo: Demo) -> str:
    return command("lab", str(demo.out), "--recipe", "own", "--recipe", "dr_grpo")


def pages(demo: Demo) -> tuple[TapePage, ...]:
    """A handful of tapes: a demonstration, and wrong and right answers before and after."""
    chosen: list[TapePage] = []

    def decode(token: int) -> str:
        return str(demo.training.tokenizer.decode([token]))

    def add(split: str, caption: str, reward: float, count: int = 1) -> None:
        found = demo.store.summaries(split=split, min_reward=reward, max_reward=reward)[:count]
        chosen.extend(tape_page(demo.store.tape(s.id, refresh=False), caption, decode) for s in found)

    add("demo", "a demonstration that goes about it the right way", 1.0)
    add("demo", "one that doesn't", 0.0)
    add("eval-before-sampled", "before RL, wrong", 0.0, 2)
    add(f"eval-{demo.training.end}-sampled", "after RL, right", 1.0, 2)
    add(f"eval-{demo.training.end}-sampled", "after RL, wrong", 0.0)
    return tuple(chosen)


def _partial_credit(part: dict[str, Any]) -> str:
    value = part["sampled"]["metrics"].get("reasoning_gym")
    return "" if value is None else f"reasoning-gym's own scorer, with partial credit: {value:.3f}"


def _show(value: float | None) -> str:
    return "unscored" if value is None else f"{value:.3f}"
