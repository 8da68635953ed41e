"""What vision models do with a picture: how many tokens it takes, where they are, and what its pixels become.

The package imports only `tapes`. The renderer, the embedded engine and the trainer use it.
"""
