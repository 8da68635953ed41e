"""Turns tapes, the records of episodes, into training data: rows of tokens, the packed stream of a batch, and
provenance.

The package imports `tapes`, `envs` and `agents`. It contains neither a loss nor an optimiser.
"""
