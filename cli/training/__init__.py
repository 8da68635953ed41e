"""Verbs that train a model and evaluate recorded episodes."""
