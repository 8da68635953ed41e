"""Tests of environments, tasks and rewards."""
