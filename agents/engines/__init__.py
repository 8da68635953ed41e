"""Engines: the protocol of what samples tokens, scripted answers, and several models in one episode.

The protocol imports `tapes` alone. The folders below it hold the engines that run a model.
"""
