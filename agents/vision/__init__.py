"""How vision models read a picture: how many tokens it takes, where these tokens are, and which features its pixels
give.

The package imports only `tapes`. The renderer, the embedded engine and the trainer use it.
"""

from ...tapes.common.extras import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "tiny_vision": "save_tiny_vision",
        "vision": "UnsupportedVision",
    },
)
