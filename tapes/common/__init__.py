"""Helpers for all packages: settings files, formatted text, progress callbacks, redaction, optional packages.

Within Tapereel, this folder imports only `tapes.errors`. Any other folder may import this one.
"""
