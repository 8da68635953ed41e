"""Runs of many episodes: groups of attempts, runs over tasks, pass@k with intervals, and model judges.

This package imports `agents.episode`, `agents.setup` and the engine protocol.
"""
