"""A training run in its directory, with settings, models, warm start, loop, evaluations, report and trackers. The demo
is here too.

It imports `finetune.loop`, `finetune.interchange` and the packages below them.
"""
