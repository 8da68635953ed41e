"""The Python API that `tapereel` exports: `run`, `train`, `evaluate`, `open`, and the class `Run`. It also estimates a
run's memory and tokens.

It imports every package below it. Only the root package and `cli` import it. `train` imports torch only when it is
called.
"""

from .public import evaluate, open, run, save_tiny_model, train
from .run_handle import Run, RunAudit

__all__ = ["Run", "RunAudit", "evaluate", "open", "run", "save_tiny_model", "train"]
