"""Verbs that check: run recorded work again, verify bytes, reproduce weights, and check what a run will use.

Imports every folder below `cli`; `cli.command` loads its modules by name.
"""
