"""The embedded engine: a transformers model sampled inside this process, its KV cache, and a server for it.

Imports the engine protocol, `agents.rendering` and `agents.engines.transport`. Torch is imported here.
"""
