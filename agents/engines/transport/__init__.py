"""Carries requests to a model server by HTTP and server-sent events, checks each answer, and marks errors worth a
retry.

The package imports the engine protocol and the packages below `agents`.
"""
