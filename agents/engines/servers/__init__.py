"""Engines that sample from a server: vLLM, SGLang, vLLM in this process, and hosted models through litellm.

The package imports the engine protocol, `agents.engines.transport` and `agents.engines.weights`.
"""
