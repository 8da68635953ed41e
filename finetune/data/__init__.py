"""From a tape to training data: rows of tokens, the packed stream of a batch, and provenance.

It imports `tapes`, `envs` and `agents`, and has no loss and no optimiser.
"""
