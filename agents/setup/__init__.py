"""Loads the objects that a configuration names: engines, players, the agent, the environment and the tasks.

This package imports `agents.engines`, `agents.episode`, `agents.rendering`, `agents.vision` and `envs`.
"""
