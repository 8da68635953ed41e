"""Tapereel: one record of an agent's episode that is what you replay, what you audit and what you train on."""
