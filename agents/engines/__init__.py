"""Engines: the protocol for sampling tokens, an engine with scripted answers, and one for several models in an episode.

The protocol imports only `tapes`. The subpackages contain the engines that run a model.
"""
