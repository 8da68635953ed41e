"""Verbs that replay episodes, verify bytes, reproduce weights, and check environments and engines.

Imports every folder below `cli`. `cli.command` loads its modules by name.
"""
