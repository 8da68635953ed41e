"""Findings of `check_env` and `check_engine`, and the parts that their reports share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from ...tapes.value import Value


class Finding(Value):
    """One fault, described for the maintainer of the checked object."""

    check: str
    """The check that found the fault, which is a key of `CheckReport.checks`."""
    severity: Literal["error", "warning"] = "error"
    sentence: str
    """What happened and how to correct it."""
    where: str | None = None
    """The line that causes the fault, as `file:line in function`, or None if the fault has no line."""


class CheckReport(Value):
    """The result of a check. Use `print(report)` for people and `report.model_dump_json()` for programs."""

    ok: bool
    """True if no finding is an error. There may be warnings."""
    checks: dict[str, str]
    """The outcome of each check: `ok`, `warned`, `failed`, or `skipped: ` with the reason."""
    findings: tuple[Finding, ...]
    seconds: float

    def shown(self, head: str, meaning: Mapping[str, str]) -> str:
        """Return the report as lines of text. `meaning` has, for each check, a sentence that is true if the check is
        ok."""
        lines = [head]
        for name, state in self.checks.items():
            state, _, reason = state.partition(": ")
            lines.append(f"  {state:<8}{name:<14}{reason or meaning[name]}")
            mine = [finding for finding in self.findings if finding.check == name]
            lines += [f"          {f.sentence}" + (f" ({f.where})" if f.where else "") for f in mine]
        return "\n".join(lines)


def checked(names: Iterable[str], findings: Iterable[Finding], skipped: Mapping[str, str]) -> dict[str, str]:
    """Return `CheckReport.checks`. `skipped` gives the reason for each skipped check."""
    checks = {name: f"skipped: {skipped[name]}" if name in skipped else "ok" for name in names}
    for finding in findings:
        if finding.severity == "error":
            checks[finding.check] = "failed"
        elif checks[finding.check] != "failed":
            checks[finding.check] = "warned"
    return checks
