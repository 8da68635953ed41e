"""The policies that learn in a run: one, or several in the same episodes, each with a history of its own.

Imports `finetune.history` and the rooms below it.
"""
