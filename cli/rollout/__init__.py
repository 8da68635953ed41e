"""Verbs that roll agents out, branch recorded episodes, and serve models and environments."""
