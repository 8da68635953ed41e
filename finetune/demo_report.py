"""What a demo leaves to read: reward.png, report.html, and the table that is printed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..tapes.rundir import METRICS
from .curves import held_out_levels, reward_curve
from .plots import plot_curve
from .report import Fact, Plot, ReportData, Score, TapePage, tape_page, write_report

if TYPE_CHECKING:
    from .demo import Demo


_PARTS = ("demonstrations", "restore", "sft", "evaluation", "rl", "controls")
"""Of the wall-clock time, one after the other; the engine's and the trainer's seconds lie inside `rl`."""


def write_demo_report(demo: Demo) -> None:
    """Write reward.png and report.html into the run directory."""
    plot = reward_plot(demo)
    plot_curve(demo.out / "reward.png", plot.curves, levels=plot.levels, title=plot.title, ylabel=plot.ylabel)
    summary = demo.summary()
    held = summary["held_out"]
    books = demo.results["books"]
    data = ReportData(
        title=f"Tapereel demo: {demo.config.algo}, seed {demo.config.seed}",
        subtitle="A tiny chat model learns to add three numbers with a calculator: imitation, then its own rollouts.",
        facts=(
            Fact(label="held-out reward, sampled", value=f"{_show(held['before'])} → {_show(held['after'])}",
                 note=f"{held['n']} tasks, none of them trained on"),
            Fact(label="greedy", value=f"{_show(held['greedy_before'])} → {_show(held['greedy_after'])}"),
            Fact(label="seconds", value=f"{summary['seconds']['total']:.0f}"),
            Fact(label="episodes on tape", value=f"{books['begun']:,}"),
        ),
        plots=(plot,),
        scores=scores(demo),
        seconds={part: summary["seconds"][part] for part in _PARTS if part in summary["seconds"]},
        tokens=books["tokens"],
        tapes=pages(demo),
        config=(demo.out / "config.yaml").read_text(),
        next=next_commands(demo),
    )  # fmt: skip
    write_report(demo.out / "report.html", data)


def reward_plot(demo: Demo) -> Plot:
    """Reward per update, with the held-out levels."""
    curves = [reward_curve(demo.config.algo.upper(), demo.out / METRICS)]
    shuffled = demo.out / "controls" / "shuffled" / METRICS
    if shuffled.exists():
        curves.append(reward_curve("control: shuffled rewards", shuffled))
    return Plot(title="Mean reward of each update's episodes", curves=tuple(curves),
                levels=held_out_levels(demo.results, "sampled"), xlabel="update", ylabel="mean reward",
                caption="Thin: each update; thick: mean over five.")  # fmt: skip


def scores(demo: Demo) -> tuple[Score, ...]:
    """The table: before, after, and the controls."""
    r = demo.results
    rows = [("after imitation (before RL)", r["before"], ""), ("after RL", r["after"], "")]
    for name, part in (r.get("controls") or {}).items():
        title = {"sft": "control: SFT only", "shuffled": "control: rewards shuffled within groups"}[name]
        rows.append((title, part, f"{part['trained_tokens']:,} trained tokens"))
    return tuple(
        Score(name=name, sampled=part["sampled"]["mean"], greedy=part["greedy"]["mean"], n=part["sampled"]["n"],
              note=note or _partial_credit(part))
        for name, part, note in rows if part
    )  # fmt: skip


def next_commands(demo: Demo) -> tuple[str, ...]:
    """Things to try on this very run."""
    return (
        f"tapereel show {demo.out}",
        f"tapereel view {demo.out}",
        f"tapereel explain {demo.out}",
        f"tapereel verify {demo.out}",
        f"tapereel audit {demo.out}",
        f"tapereel reproduce {demo.out}",
        f"tapereel lab {demo.out} --recipe own --recipe dr_grpo",
    )


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
    add("eval-after-sampled", "after RL, right", 1.0, 2)
    add("eval-after-sampled", "after RL, wrong", 0.0)
    return tuple(chosen)


def _partial_credit(part: dict[str, Any]) -> str:
    value = part["sampled"]["metrics"].get("reasoning_gym")
    return "" if value is None else f"reasoning-gym's own scorer, with partial credit: {value:.3f}"


def _show(value: float | None) -> str:
    return "unscored" if value is None else f"{value:.3f}"
