"""Environments of others, as ours: Gymnasium, MCP servers, TRL, reasoning-gym, plain tools and the sandbox.

Imports `envs`, `envs.rewards` and the floor below. Each adapter imports its package when it is used.
"""
