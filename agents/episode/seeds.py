"""Seeds of an episode. Every random stream is derived from one seed, so a replay draws the same numbers."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *parts: str | int) -> int:
    """Return the first 8 bytes of SHA-256(seed, parts) as an integer below 2**63.

    Different `parts` give independent streams, such as one for each call, attempt, environment and purpose.
    """
    text = "/".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def seed_stream(path: str, conversation: str) -> str:
    """Return the name of the seed stream for one agent's calls in one conversation.

    Each stream counts its own calls. So a call's seed doesn't depend on the order in which concurrent agents ask.
    """
    return f"{path}#{conversation}" if conversation else path
