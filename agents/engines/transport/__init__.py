"""Sends requests to a model server over HTTP, checks each answer, and marks the errors after which a retry may help.

The package imports the engine protocol and the packages below `agents`.
"""
