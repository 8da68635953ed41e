"""The table and the curves of `pretrained.py`, from the lines that its runs left. Trains nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from learning_report import COLOURS, FAINT, INK

Run = dict[str, Any]
BEGIN, END = "<!-- pretrained models -->", "<!-- end of pretrained models -->"
STYLES = {"all": (COLOURS[0], "all weights"), "lora": (COLOURS[2], "LoRA"), "shuffled": (FAINT, "shuffled rewards")}
HEAD = (
    "task",
    "trained",
    "seed",
    "updates",
    "sampled, before and after",
    "change",
    "greedy",
    "CPU s",
    "wall s",
    "peak GB",
)


def table(runs: Sequence[Run]) -> str:
    """Markdown: a line for each run."""
    lines = [_line(HEAD), _line(["---"] * len(HEAD))]
    for run in runs:
        trained = ", ".join([STYLES[run["arm"]][1], *(f"`{text}`" for text in run["sets"])])
        sampled = f"{_mean(run['sampled_before'])} -> {_with_interval(run['sampled_after'])}"
        greedy = f"{_mean(run['greedy_before'])} -> {_mean(run['greedy_after'])}" if "greedy_after" in run else ""
        change = _with_interval(run["sampled_change"], "+.3f")
        spent = (f"{run['cpu_seconds']:.0f}", f"{run['wall_seconds']:.0f}", f"{run['peak_gb']:.1f}")
        lines.append(_line([run["task"], trained, run["seed"], run["updates"], sampled, change, greedy, *spent]))
    return "\n".join(lines)


def _mean(found: Run) -> str:
    return f"{found['value']:.3f}"


def _with_interval(found: Run, form: str = ".3f") -> str:
    return f"{found['value']:{form}} [{found['low']:{form}}, {found['high']:{form}}]"


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def put(docs: Path, runs: Sequence[Run]) -> None:
    """The table between the two marks of learning.md, and the curves."""
    page = docs / "project" / "learning.md"
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no place for the table: put the lines {BEGIN} and {END} where it is to be")
    page.write_text(f"{before}{begin}\n\n{table(runs)}\n\n{end}{after}", encoding="utf-8")
    figure(docs / "first-letter.png", [run for run in runs if run["task"] == "letter" and by_defaults(run)])


def by_defaults(run: Run) -> bool:
    """Whether `--set` has set nothing that training depends on."""
    return all(text.startswith("evaluation.") for text in run["sets"])


def figure(path: Path, runs: Sequence[Run]) -> None:
    """Mean reward of each update's episodes, and of the held-out tasks before and after. Needs matplotlib, which
    `tapereel[demo]` brings."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 9, "axes.edgecolor": FAINT, "text.color": INK, "axes.labelcolor": INK}):
        drawn = Figure(figsize=(8, 3.4), layout="constrained")
        FigureCanvasAgg(drawn)
        axes = drawn.subplots()
        for arm, (colour, name) in STYLES.items():
            own = [run for run in runs if run["arm"] == arm]
            for k, run in enumerate(own):
                n = len(run["curve"])
                label = f"{name}, {len(own)} seed{'s' * (len(own) > 1)}" if not k else None
                axes.plot(range(1, n + 1), run["curve"], color=colour, linewidth=1.2, label=label)
                for x, when in ((0, "before"), (n + 1, "after")):
                    found = run[f"sampled_{when}"]
                    ends = [[found["value"] - found["low"]], [found["high"] - found["value"]]]
                    axes.errorbar([x], [found["value"]], ends, color=colour, marker="o", markersize=4, linewidth=1)
        axes.set_ylim(-0.03, 1.03)
        axes.set_xlabel("update (at both ends: held-out words, with 95 % interval)")
        axes.set_ylabel("mean reward")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=FAINT, alpha=0.5, linewidth=0.5)
        axes.legend(frameon=False, loc="upper left")
        drawn.savefig(path, dpi=110, facecolor="#ffffff")
