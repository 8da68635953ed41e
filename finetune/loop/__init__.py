"""The training loop: it runs rollouts and updates side by side, keeps samples fresh, and records each update.

It imports `finetune.data`, `finetune.objective`, `finetune.recipes` and `finetune.trainer`.
"""
