"""Many episodes: groups of attempts, runs over tasks, pass@k with intervals, and model judges.

Imports `agents.episode` and `agents.setup`.
"""
