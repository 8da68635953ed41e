"""Inspects a training run: explains each token's part in training, recomputes checkpoints, and tries other recipes.

It imports `finetune.run` and the packages below it.
"""

from ...tapes.common.extras import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "reproducer": "reproduce",
        "requery": "requery_run",
    },
)
