"""Adapters: Gymnasium, MCP servers, TRL, verifiers, reasoning-gym, plain functions as tools, and the sandbox.

This package imports `envs`, `envs.rewards` and `tapes`. Each adapter imports its optional package when it is used.
"""

from ...tapes.common.extras import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "calculator": "word_problems",
        "mcp": "McpServer",
        "sandbox": "Sandbox",
        "tools": "ToolEnvironment ToolFailed",
        "trl": "TRLEnvironment trl_reward trl_row",
    },
)
