"""Reads from a run directory how its tapes were recorded: the agent, the environment and the tokenizer.

The functions import code that the run's configuration names, as a resumed run does. They never import names from a
tape, since a tape may come from an untrusted source.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from ...envs.load_named import load_named
from ...tapes.common.hub import local_folder
from ...tapes.errors import UsageError
from ...tapes.records import Identity
from ...tapes.store.run_directory import CONFIG, recorded_settings
from ..episode.agent import Agent
from .setup import is_unnamed, load_agent

if TYPE_CHECKING:
    from ..rendering.renderer import Renderer
    from .engine_config import RendererConfig


def tokenizer_folder(run: str | Path) -> str | None:
    """Return the folder of the run's tokenizer: its newest checkpoint, or else the model that the run started with."""
    saved = sorted((Path(run) / "checkpoints").glob("update-*/hf/tokenizer.json"))
    if saved:
        return str(saved[-1].parent)
    engine = recorded_settings(run).get("engine") or {}
    names = (engine.get(key) for key in ("model", "tokenizer"))
    folders = (local_folder(name) for name in names if isinstance(name, str))
    return next((str(folder) for folder in folders if folder is not None), None)


def recorded_renderer(run: str | Path, folder: str | None = None) -> Renderer | None:
    """Return the renderer with the run's settings and the tokenizer in `folder`, or None if there is no tokenizer.

    By default `folder` is the folder of the run's tokenizer.
    """
    folder = folder or tokenizer_folder(run)
    if folder is None:
        return None
    return recorded_rendering(run).load(folder)


def recorded_rendering(run: str | Path) -> RendererConfig:
    """Return the settings of the run's renderer."""
    from .engine_config import RendererConfig

    return RendererConfig.model_validate((recorded_settings(run).get("engine") or {}).get("renderer") or {})


def recorded_agent(run: str | Path, name: Agent | str | None, identity: Identity | None) -> Agent:
    """Return the agent. `name` is an Agent, or the name of an agent to import. If it is None, the agent in the run's
    configuration is imported.

    Raises UsageError if `name` is None and the configuration names no agent. `identity` is the agent on the tapes, for
    the error message only.
    """
    if isinstance(name, Agent):
        return name
    recorded = name or recorded_settings(run).get("agent")
    if isinstance(recorded, str):
        return load_agent(recorded)
    recorded_of = f" (the tapes were recorded of {identity.cls or identity.name})" if identity is not None else ""
    raise UsageError(f"{run} has no {CONFIG} that names an agent: give `agent=module:name`{recorded_of}")


def import_steps(run: str | Path) -> None:
    """Import the environment in the run's configuration, because its module defines the step types on the tapes."""
    env = recorded_settings(run).get("env")
    # An environment that Python code passed as an object has no name to import. That code imports its module.
    if isinstance(env, str) and not is_unnamed(env):
        load_named(env)


def with_trainer_settings(engine: Mapping[str, JsonValue], trainer: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return engine settings for sampling outside training. An embedded engine gets the trainer's device settings."""
    if engine.get("kind") != "embedded":
        return dict(engine)
    given = {key: trainer.get(key) for key in ("device", "dtype", "threads")}
    return {**engine, **{key: value for key, value in given.items() if value is not None}}
