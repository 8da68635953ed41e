"""Chat templates and tokens: how a conversation becomes prompt ids, and how sampled ids become text.

Imports `tapes` alone.
"""
