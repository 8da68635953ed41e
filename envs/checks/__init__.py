"""Checks whether an environment keeps its contract, and whether recorded actions give the same results and rewards.

This package imports the other folders of `envs`, and `tapes`. `agents` and `cli` may import it.
"""
