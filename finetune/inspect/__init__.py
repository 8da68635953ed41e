"""Inspects a training run: explains each token's role, reproduces checkpoints, and tries updates with other recipes.

It imports `finetune.run` and the packages below it.
"""
