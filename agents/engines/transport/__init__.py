"""What carries requests to a server: HTTP, server-sent events, retries, and the checks of each answer.

Imports the engine protocol and the floors below.
"""
