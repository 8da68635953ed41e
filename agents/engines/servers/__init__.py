"""Engines that sample from a server: vLLM, SGLang, vLLM started on this machine, and hosted models through litellm.

The package imports the engine protocol, `agents.engines.transport` and `agents.engines.weights`, and reads a model's
configuration with `agents.engines.embedded.pretrained`.
"""

from ....tapes.common.extras import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "launch": "LocalServer",
        "litellm_engine": "LiteLLMEngine",
        "server_config": "Broadcast",
        "server_engine": "RemoteEngine",
        "sglang": "SGLangGenerate",
        "vllm": "Chat Completions Generate",
    },
)
