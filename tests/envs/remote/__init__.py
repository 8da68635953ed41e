"""Environments that run elsewhere."""
