"""The training loop, which runs rollouts and updates at the same time, and records each update.

It imports `finetune.data`, `finetune.objective`, `finetune.recipes` and `finetune.trainer`.
"""

from ...tapes.common.extras import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "delivery": "NotDelivered",
        "history": "BrokenHistory History",
        "learner": "Learner",
        "loop": "Loop SamplerMismatch",
        "loop_config": "CriticConfig LoopConfig",
        "plan": "UpdateInfo",
        "policy": "Policy",
        "rollouts": "NothingUsable",
    },
)
