"""Verbs that show a run as tables in the terminal, in the browser, and token by token.

Imports `tapes` and `finetune.inspect`. `cli.command` loads its modules by name.
"""
