"""The training loop, which runs rollouts and updates at the same time, and records each update.

It imports `finetune.data`, `finetune.objective`, `finetune.recipes` and `finetune.trainer`.
"""
