"""Verbs that check a run, a tape, an environment or tasks, and what they share in printing verdicts."""
