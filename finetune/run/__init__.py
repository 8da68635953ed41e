"""A training run in its directory: settings, models, warm start, loop, evaluations, report and trackers; also the demo.

It imports `finetune.loop`, `finetune.interchange` and the packages below them.
"""
