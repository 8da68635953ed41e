"""Inspects a training run: explains each token's part in training, recomputes checkpoints, and tries other recipes.

It imports `finetune.run` and the packages below it.
"""
