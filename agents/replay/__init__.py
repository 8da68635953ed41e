"""Replay runs agent code again on recorded answers and compares it step by step. Recorded episodes can be branched too.

This package imports `agents.episode`, `agents.rendering`, `agents.runs`, `agents.setup` and the engine protocol.
"""
