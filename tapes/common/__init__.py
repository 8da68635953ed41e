"""Helpers for all packages: settings files, formatted text, progress callbacks, redaction, optional packages.

From Tapereel, this folder imports only `tapes.errors`. Any other folder may import it.
"""
