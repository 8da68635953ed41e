"""Verbs that run agents, branch recorded episodes, and serve models, environments and a gateway.

Imports `agents` and `envs`. `cli.command` loads its modules by name.
"""
