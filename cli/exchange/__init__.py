"""Verbs that export tapes as rows of datasets and import rows as tapes.

Imports `finetune.interchange`; `cli.command` loads its modules by name.
"""
