"""Carries requests to a model server: HTTP, server-sent events, errors marked as worth a retry, checks of each answer.

Imports the engine protocol and the packages below `agents`.
"""
