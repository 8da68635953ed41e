"""Verbs that show a run as tables in the terminal, in the browser, and token by token.

This folder imports `tapes` and `finetune.inspect`. `cli.command` loads the modules in it by name.
"""
