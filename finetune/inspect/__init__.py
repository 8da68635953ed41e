"""Questions to a training run: what each token meant to the update, reproduction, and updates tried again.

Imports `finetune.run` and the rooms below it.
"""
