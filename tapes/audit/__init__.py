"""Answers about a run: its costs, its unusual episodes, its differences from another run, and verdicts of checks.

This folder imports `tapes`, `tapes.common` and `tapes.store`. It never changes a tape.
"""

from ..common.extras import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "auditor": "audit_run",
        "verdict": "Likely Verdict Verdicts verified",
    },
)
