"""Verbs that train a model and evaluate recorded episodes.

Imports `finetune` and `agents`. `cli.command` loads its modules by name.
"""
