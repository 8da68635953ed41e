"""The loop: rollouts go on while the trainer updates, with pacing, metrics, warm start and evaluation.

Imports `finetune.policies` and the rooms below it.
"""
