"""Questions to a run: what was spent, which episodes look odd, how two runs differ, and verdicts of checks.

Imports `tapes`, `tapes.common` and `tapes.store`. It never changes a tape.
"""
