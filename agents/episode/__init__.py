"""One episode: the agent, its model calls, limits, the recorder, and the rollout that closes the tape.

Imports the engine protocol and `agents.rendering`. Replay, runs and the gateway build on it.
"""
