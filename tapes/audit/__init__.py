"""Answers about a run: its costs, its unusual episodes, its differences from another run, and verdicts of checks.

This folder imports `tapes`, `tapes.common` and `tapes.store`. It never changes a tape.
"""
