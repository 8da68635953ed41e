"""Chat templates and tokens: how a conversation becomes prompt ids, and how sampled ids become text.

The package imports only `tapes`.
"""
