"""Engines that sample from a server: vLLM, SGLang, vLLM started on this machine, and hosted models through litellm.

The package imports the engine protocol, `agents.engines.transport` and `agents.engines.weights`, and reads a model's
configuration with `agents.engines.embedded.pretrained`.
"""
