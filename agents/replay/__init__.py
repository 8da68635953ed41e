"""Replay: agent code run again on recorded answers, compared step by step, and branches of a recorded episode.

Imports `agents.episode` and the engine protocol.
"""
