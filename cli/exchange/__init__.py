"""Verbs that export tapes as datasets, and import datasets as tapes.

Imports `finetune.interchange`. `cli.command` loads its modules by name.
"""
