"""Verbs that run agents, branch recorded episodes, and serve models, environments and a gateway.

This folder imports `agents` and `envs`. `cli.command` loads the modules in it by name.
"""
