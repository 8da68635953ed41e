"""The trainer: log-probs, micro-batches, gradient, optimiser, critic, checkpoints, and several processes.

Imports `finetune.data` and `finetune.objective`. It knows no loop and no environment.
"""
