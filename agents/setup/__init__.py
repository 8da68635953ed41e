"""What a configuration names, loaded: engines, players, the agent, the environment and the tasks.

Imports `agents.engines`, `agents.episode` and `envs`.
"""
