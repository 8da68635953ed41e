"""Tests of the verbs `run`, `train` and `explain`."""
