"""The trainer: log-probs, micro-batches, gradient, optimiser, critic, checkpoints, and training in several processes.

It imports `finetune.data` and `finetune.objective`. It doesn't depend on the training loop or on environments.
"""
