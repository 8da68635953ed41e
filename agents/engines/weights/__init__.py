"""Weight sync, which sends the policy's new weights to servers by reload, shared memory, NCCL or LoRA.

The package imports `agents.engines.transport`, `envs` and `tapes`.
"""

from ....tapes.common.extras import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "weight_config": "AdapterConfig add_adapters",
        "weight_sync": "PublishFailed VLLMReload",
    },
)
