"""Checks: does an environment keep its contract, do recorded actions give the same results, and the same rewards?

Imports the other folders of `envs`, and `tapes`. `agents` and `cli` may import it.
"""
