"""Verbs that export tapes as datasets, and import datasets as tapes.

This folder imports `finetune.interchange`. `cli.command` loads the modules in it by name.
"""
