"""Loads rewards by name, as in a configuration: `module:name`, a `.py` file, or the address of a reward model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from ...tapes import Tape
from ...tapes.common.redact import holds_secret, without_secrets
from ...tapes.errors import UsageError
from ..load_named import load_named
from .sources import NoReward, Rewards, RewardSource, Scorer


def as_rewards(found: Any, name: str = "") -> Rewards[Tape]:
    """A `Rewards`, a `RewardSource`, or a function from a tape to its score, as `Rewards`."""
    if isinstance(found, Rewards):
        return found
    if isinstance(found, RewardSource):
        return Rewards([found])
    if callable(found) and not isinstance(found, type):
        return Rewards([RewardSource(score=cast(Scorer[Tape], found))])
    raise NoReward(
        f"{name or 'the reward'} is a {type(found).__name__}; a reward must be a Rewards, a RewardSource, or a "
        "function from a tape to a number, named numbers or None"
    )


def load_rewards(names: Sequence[str]) -> Rewards[Tape] | None:
    """All named rewards together; None for no names. UsageError if a name is not that of a reward."""
    every: list[RewardSource[Any]] = []
    for name in names:
        found = load_reward(name)
        every += (*found.sources, *found.relative)
    try:
        return Rewards(every) if names else None
    except ValueError as error:
        raise UsageError(f"rewards: {error}") from error


def load_reward(name: str) -> Rewards[Tape]:
    """Load `http://...` of a reward model, `file.py` with a `reward_func`, or `module:name`.

    UsageError if the name is invalid, or an address that holds a secret: names are recorded with their scores.
    """
    if holds_secret(name):
        raise UsageError(
            f"{without_secrets(name)} contains a user, a password or a key, which would be recorded; put the secret "
            "into an environment variable, write http_reward(url, key_variable=...) in a module, and name it here as "
            "module:name"
        )
    if name.startswith(("http://", "https://")):
        from .http_rewards import http_reward

        return Rewards([http_reward(name)])
    if name.endswith(".py"):
        from .reward_files import file_reward

        return Rewards([file_reward(name)])
    try:
        return as_rewards(load_named(name), name)
    except NoReward as error:
        raise UsageError(str(error)) from error
