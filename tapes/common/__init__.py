"""Helpers for every room: settings files, text for people, progress callbacks, redaction, optional packages.

Imports only `tapes.errors` from the package. Any room may import it.
"""
