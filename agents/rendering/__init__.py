"""Applies chat templates and tokenizers, so that conversations become prompt ids and sampled ids become text.

The package imports only `tapes`.
"""
