"""A training run in its directory: settings, models, warm start, loop, evaluations, report and trackers; also the demo.

It imports `finetune.loop`, `finetune.interchange` and the packages below them.
"""

from ...tapes.common.extras import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "demonstrations": "DemoConfig",
        "load_policy": "freeze",
        "player_config": "TrainerConfig",
        "run_report": "TrainSummary",
        "trackers": "Axes",
        "train_config": "EvaluationConfig TrainConfig",
        "train_run": "train",
    },
)
