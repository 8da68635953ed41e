"""Vision models: how many tokens a picture takes, where they stand, and what a model computes of the pixels.

Imports `tapes` alone. Renderer, embedded engine and trainer use it.
"""
