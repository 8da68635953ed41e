"""The Python API at the top of the package: `run`, `train`, `evaluate`, `open`, and the `Run` that they return.

Imports every room below it. Only the root package imports it, and each function imports torch when it trains.
"""

from .public import evaluate, open, run, save_tiny_model, train
from .run_handle import Run, RunAudit

__all__ = ["Run", "RunAudit", "evaluate", "open", "run", "save_tiny_model", "train"]
