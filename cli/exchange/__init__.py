"""Verbs that export tapes to other formats and import traces of other systems as tapes.

Imports `finetune.interchange`; `cli.command` loads its modules by name.
"""
