"""Tests of the viewer: what it is given of a run, its server, its bundle, and the page in a real browser."""
