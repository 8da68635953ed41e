"""A run on disk: segments of records, the writer, the index, recovery after a crash, verification and media.

Imports `tapes` and `tapes.common`. Every room above may import it.
"""
