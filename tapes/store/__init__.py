"""A run on disk: the segments that hold its records, its media, the writer, the index, recovery after a crash, and
verification.

Imports `tapes` and `tapes.common`. Every package above may import it.
"""

from ..common.extras import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "disk": "Disk",
        "lease": "Lease LeaseLost end_lease",
        "run_directory": "CONFIG HeldOut METRICS Results RunDir append_metrics read_metrics",
        "segment": "encode_line peek",
        "store": "Store",
        "verifier": "verify",
    },
)
