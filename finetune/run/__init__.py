"""A training run in its directory: settings, models, warm start, loop, evaluations, report and trackers; the demo.

Imports `finetune.loop`, `finetune.interchange` and the rooms below them.
"""
