"""The table and the plot of `learning.py`, from what its runs left: one JSON object each. Trains nothing."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Run = dict[str, Any]
COLOURS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626")
BEGIN, END = "<!-- the table -->", "<!-- end of the table -->"
INK, FAINT = "#1f2430", "#b9c0cc"


def table(runs: Sequence[Run], tasks: Iterable[str], algos: Sequence[str]) -> str:
    """Markdown: for each task what was earned on held-out tasks, then what the updates looked like."""
    seeds = ", ".join(map(str, sorted({run["seed"] for run in runs})))
    parts = [f"{len(runs)} runs, of seeds {seeds}."]
    for task in tasks:
        own = [run for run in runs if run["task"] == task]
        if own:
            parts.append("\n".join([f"### {task}", "", *_earned(own, algos), "", *_looked(own, algos)]))
    return "\n\n".join(parts)


def _earned(runs: Sequence[Run], algos: Sequence[str]) -> list[str]:
    seeds = sorted({run["seed"] for run in runs})
    lines = [
        _line(["", *(f"seed {seed}" for seed in seeds), "mean", "greedy, mean", "sampled tokens", "CPU, s"]),
        _line(["---"] * (len(seeds) + 5)),
    ]
    first = {run["seed"]: run for run in runs}
    lines.append(_row("warm start", [first[seed]["before"] for seed in seeds], "", ""))
    for algo in algos:
        own = {run["seed"]: run for run in runs if run["algo"] == algo}
        if own:
            # An evaluation's tokens are held out; what is left was sampled to be trained on.
            sampled = sum(run["tokens"]["sampled"] - run["tokens"]["held_out"] for run in own.values())
            lines.append(
                _row(
                    algo,
                    [own[s]["after"] if s in own else None for s in seeds],
                    f"{sampled:,}",
                    f"{statistics.fmean(run['cpu_seconds'] for run in own.values()):.0f}",
                )
            )
    return lines


def _row(name: str, found: Sequence[Any], tokens: str, cpu: str) -> str:
    """`mean ± half of the 95 % interval` on the held-out tasks for each seed."""
    cells = [f"{f['sampled']['mean']:.3f} ± {1.96 * f['sampled']['error']:.3f}" if f else "-" for f in found]
    known = [f for f in found if f]
    means = [f"{statistics.fmean(f[how]['mean'] for f in known):.3f}" for how in ("sampled", "greedy")]
    return _line([name, *cells, *means, tokens, cpu])


def _looked(runs: Sequence[Run], algos: Sequence[str]) -> list[str]:
    lines = [
        _line(
            [
                "",
                "flat groups",
                "clipped tokens",
                "surprise, first and last",
                "KL to the sampler",
                "explained variance, first and last",
            ]
        ),
        _line(["---"] * 6),
    ]
    for algo in algos:
        curves = [run["curve"] for run in runs if run["algo"] == algo]
        if curves:
            cells = [
                f"{share:.0%}" if share is not None else "-"
                for share in (_mean(curves, "group/flat"), _mean(curves, "clip"))
            ]
            both = [_mean([c[:5] for c in curves], "logprob"), _mean([c[-5:] for c in curves], "logprob")]
            cells.append(", ".join("-" if v is None else f"{-v:.2f}" for v in both))
            kl = _mean(curves, "kl/old")
            cells.append("-" if kl is None else f"{kl:.4f}")
            cells.append(
                ", ".join(
                    "-" if v is None else f"{v:.2f}"
                    for v in (
                        explained(line for c in curves for line in c[:5]),
                        explained(line for c in curves for line in c[-5:]),
                    )
                )
            )
            lines.append(_line([algo, *cells]))
    return lines


def explained(lines: Iterable[Run]) -> float | None:
    """Share of the spread of the critic's targets that its values account for; None without a critic."""
    shares = []
    for line in lines:
        if line.get("value/error") is not None:
            spread = line["value/target/square"] - line["value/target"] ** 2
            shares.append(1 - line["value/error"] / spread if spread > 0 else 0.0)
    return statistics.fmean(shares) if shares else None


def _mean(curves: Sequence[Sequence[Run]], key: str) -> float | None:
    found = [line[key] for curve in curves for line in curve if line.get(key) is not None]
    return statistics.fmean(found) if found else None


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def put_table(page: Path, made: str) -> None:
    """Between the page's two marks."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no place for the table: put the lines {BEGIN} and {END} where it is to be")
    page.write_text(f"{before}{begin}\n\n{made}\n\n{end}{after}", encoding="utf-8")


def figure(path: Path, runs: Sequence[Run], tasks: Sequence[str], algos: Sequence[str]) -> None:
    """Mean reward of each update's episodes: a row for each task, a column for each recipe, a line for each seed. Needs
    matplotlib, which `tapereel[demo]` brings."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [task for task in tasks if any(run["task"] == task for run in runs)]
    style: dict[Any, Any] = {
        "font.size": 8,
        "axes.edgecolor": FAINT,
        "axes.labelcolor": INK,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
    }
    with matplotlib.rc_context(style):
        drawn = Figure(figsize=(9, 1.7 * len(shown) + 0.4), layout="constrained")
        FigureCanvasAgg(drawn)
        panels = drawn.subplots(len(shown), len(algos), sharex="row", sharey="row", squeeze=False)
        for row, task in zip(panels, shown, strict=True):
            for axes, algo in zip(row, algos, strict=True):
                _panel(axes, [run for run in runs if (run["task"], run["algo"]) == (task, algo)])
            row[0].set_ylabel(f"{task}\nreward")
        for axes, algo in zip(panels[0], algos, strict=True):
            axes.set_title(algo, fontsize=9)
        for axes in panels[-1]:
            axes.set_xlabel("update")
        drawn.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower right", ncols=3, frameon=False)
        drawn.savefig(path, dpi=110, facecolor="#ffffff")


def _panel(axes: Any, runs: Sequence[Run]) -> None:
    for k, run in enumerate(sorted(runs, key=lambda run: run["seed"])):
        rewards = [line["reward"] for line in run["curve"]]
        axes.plot(
            range(1, len(rewards) + 1),
            rewards,
            color=COLOURS[k % len(COLOURS)],
            linewidth=1.1,
            label=f"seed {run['seed']}",
        )
    axes.set_ylim(-0.03, 1.03)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=FAINT, alpha=0.5, linewidth=0.5)
    axes.tick_params(length=0)
