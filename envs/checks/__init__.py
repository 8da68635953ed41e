"""Checks of environments and rewards: conformance, executing recorded actions again, and scoring tapes again.

Imports the other rooms of `envs` and the floor below.
"""
