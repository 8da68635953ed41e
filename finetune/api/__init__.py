"""The Python API that `tapereel` exports: `run`, `train`, `evaluate`, `open` and the class `Run`, and an estimate of a
run's memory and tokens.

Only the root package and `cli` import this package, and it may import all others. torch is imported when `train` is
called, not before.
"""

from ...tapes.common.extras import lazy_names
from .public import evaluate, open, run, save_tiny_model, train
from .run_handle import Run, RunAudit

__all__ = ["Run", "RunAudit", "evaluate", "open", "run", "save_tiny_model", "train"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "public": "save_tiny_model",
    },
)
