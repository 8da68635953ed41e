"""The trainer: log-probs, micro-batches, gradient, optimiser, critic, checkpoints, and training in several processes.

It imports `finetune.data` and `finetune.objective`. It doesn't depend on the training loop or on environments.
"""

from ...tapes.common.extras import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "checkpoint": "checkpoints copied_weights save_checkpoint",
        "critic": "Critic CriticTrainer Value",
        "distributed": "Processes",
        "logprobs": "forward score",
        "micro_batches": "plan",
        "options": "OptimiserConfig fitted",
        "ranks": "DataParallelRanks Ranks ShardedRanks",
        "reference": "EarlierWeights",
        "schedule": "Schedule",
        "trainer": "Trainer",
        "updates": "Division",
    },
)
