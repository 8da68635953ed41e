"""A run on disk, with its segments of records, the writer, the index, recovery after a crash, verification and media.

Imports `tapes` and `tapes.common`. Every package above may import it.
"""
