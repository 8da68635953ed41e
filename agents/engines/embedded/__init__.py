"""The embedded engine samples a transformers model inside this process, with its own KV cache and HTTP server.

The package imports the engine protocol, `agents.rendering` and `agents.engines.transport`. It imports torch.
"""
