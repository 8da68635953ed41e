"""Adapters: Gymnasium, MCP servers, TRL, verifiers, reasoning-gym, plain functions as tools, and the sandbox.

This package imports `envs`, `envs.rewards` and `tapes`. Each adapter imports its optional package when it is used.
"""
