"""From a tape to training data: rows of tokens, the packed stream of a batch, and provenance.

Imports the floors below. It knows no loss and no optimiser.
"""
