"""How episodes end, and which of them may be trained on."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """How an episode ended. Together with the cause it decides whether the episode may be trained on (`trains`)."""

    FINISHED = "finished"
    """The environment reported `terminated`."""
    TRUNCATED = "truncated"
    """The environment reported `truncated`."""
    LIMIT = "limit"
    """The rollout reached a limit on turns, tokens, context, the agent's time or the system's time (`cause.type`)."""
    ERROR = "error"
    """Code raised an exception. `cause.type` names whose code it was."""
    CANCELLED = "cancelled"
    """The caller stopped the episode."""
    CRASHED = "crashed"
    """The process died, and recovery wrote this end."""


class CauseType(StrEnum):
    """Who caused an end, or which limit was reached. `ours` stands for Tapereel itself."""

    AGENT = "agent"
    ENVIRONMENT = "environment"
    MODEL = "model"
    OURS = "ours"
    TURNS = "turns"
    TOKENS = "tokens"
    CONTEXT = "context"
    AGENT_SECONDS = "agent_seconds"
    SECONDS = "seconds"
    """The system's time or, on tapes from versions with a single timer, the time of the whole episode."""


TRAINED_SPLITS = ("train", "demo", "corpus")
"""Splits whose tapes may be used for training. All other splits are held out."""
BRANCH = "branch"
"""The default split of continuations, which are for inspection. They are neither trained on nor episodes of the run."""
TRAINABLE_LIMITS = frozenset({CauseType.TURNS, CauseType.TOKENS, CauseType.CONTEXT, CauseType.AGENT_SECONDS})


def trains(status: Status | None, cause: CauseType | None) -> bool:
    """Return whether an episode with this end may be scored and, if scored, trained on. Only this function decides it.

    The episode may be used if the policy caused its end: it finished, was truncated, failed with an error in the
    agent's own code, or reached a limit on turns, tokens, context or the agent's time. It may not be used if it was
    cancelled, crashed, is still running, reached a limit on the system's time, or failed with an error in the
    environment, the model or Tapereel. Training would then reward or punish the policy for what the machine did.
    """
    if status in (Status.FINISHED, Status.TRUNCATED):
        return True
    if status is Status.LIMIT:
        return cause in TRAINABLE_LIMITS
    return status is Status.ERROR and cause is CauseType.AGENT
