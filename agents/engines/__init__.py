"""The protocol of engines that sample tokens, an engine with scripted answers, and one that combines several engines.

The protocol imports only `tapes`. The subpackages contain the engines that run a model.
"""
