"""A run on disk: the segments that hold its records, its media, the writer, the index, recovery after a crash, and
verification.

Imports `tapes` and `tapes.common`. Every package above may import it.
"""
