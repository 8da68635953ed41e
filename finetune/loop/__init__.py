"""The training loop: rollouts and updates side by side, how fresh the samples must be, and the record of each update.

Imports `finetune.data`, `finetune.objective`, `finetune.recipes` and `finetune.trainer`.
"""
