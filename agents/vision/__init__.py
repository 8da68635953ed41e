"""How vision models read a picture: how many tokens it takes, where these tokens are, and which features its pixels
give.

The package imports only `tapes`. The renderer, the embedded engine and the trainer use it.
"""
