"""Vision models: how many tokens a picture takes, where they are, and what a model computes from the pixels.

The package imports only `tapes`. The renderer, the embedded engine and the trainer use it.
"""
