"""Engines sample tokens. Here are their protocol, an engine with scripted answers, and a combination of several
engines.

The protocol imports only `tapes`. The subpackages contain the engines that run a model.
"""
