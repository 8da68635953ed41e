"""Verbs that train a model and evaluate recorded episodes.

This folder imports `finetune` and `agents`. `cli.command` loads the modules in it by name.
"""
