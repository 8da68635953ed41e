"""The embedded engine samples a transformers model inside this process, with its own KV cache and HTTP server.

The package imports the engine protocol, `agents.rendering` and `agents.engines.transport`. It imports torch.
"""

from ....tapes.common.extras import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "embedded_engine": "EmbeddedEngine",
        "embedded_server": "EngineServer",
        "kv_cache": "SlotDecoder",
        "pretrained": "Pretrained load_pictures load_pretrained load_tokenizer weights_digest",
        "tiny_model": "char_tokenizer",
    },
)
