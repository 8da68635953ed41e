"""Verbs that replay episodes, verify bytes, reproduce weights, and check environments and engines.

This folder imports every layer below `cli`. `cli.command` loads the modules in it by name.
"""
