"""Old names and their present ones, so that this version reads runs that an earlier one recorded.

Two kinds of names stand in a run directory: paths of code (`module:qualname`, on tapes as `Identity.cls` and in
`config.yaml`) and configuration keys (in `config.yaml`). Nothing in a run directory is rewritten: each reader
translates what it reads. What a user writes is not translated; an old name there is an error that states the new one.

How to rename a thing whose name can stand in a run:

* a module or a class: add the old path to `PATHS`;
* a configuration key: add the old key to `KEYS`; where values must change too, add a function to `RULES`.

An old name must never get a new meaning. Translating a configuration of this version changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .config_yaml import Group

PATHS: Mapping[str, str] = {
    # Agents.
    "tapereel.agents.agent": "tapereel.agents.episode.agent",
    "tapereel.agents.chat": "tapereel.agents.episode.chat",
    "tapereel.agents.gateway.control": "tapereel.agents.gateway.gateway_control",
    "tapereel.finetune.trl_prompts": "tapereel.finetune.interchange.trl_prompts",
    # Environments, and what their configurations name.
    "tapereel.envs.base": "tapereel.envs.environment",
    "tapereel.envs.calculator": "tapereel.envs.adapters.calculator",
    "tapereel.envs.gym": "tapereel.envs.adapters.gym",
    "tapereel.envs.mcp": "tapereel.envs.adapters.mcp",
    "tapereel.envs.reasoning": "tapereel.envs.adapters.reasoning",
    "tapereel.envs.remote.client": "tapereel.envs.remote.env_client",
    "tapereel.envs.sandbox": "tapereel.envs.adapters.sandbox",
    "tapereel.envs.tools": "tapereel.envs.adapters.tools",
    "tapereel.envs.trl": "tapereel.envs.adapters.trl",
    # Rewards.
    "tapereel.agents.judge": "tapereel.agents.runs.judge",
    "tapereel.envs.rewards.files": "tapereel.envs.rewards.named_rewards",
    "tapereel.envs.rewards.local": "tapereel.envs.rewards.local_models",
    "tapereel.envs.rewards.recipe": "tapereel.envs.rewards.sources",
    "tapereel.envs.rewards.remote": "tapereel.envs.rewards.reward_models",
    # The demo's agent and environment.
    "tapereel.finetune.demo": "tapereel.finetune.run.demonstrations",
}
"""Old path -> present path: of a module (`package.module`), or of one name in it (`package.module:Name`), which comes
first. Only modules whose classes or functions can stand on a tape or in a recorded `config.yaml`."""

KEYS: Mapping[str, str | None] = {
    "refills": "retries",  # of `run`
    "by": None,  # of `run`
}
"""Old configuration key -> present key, both dotted; None drops the setting. `*` stands for any one key, and each `*`
of the present key is filled from the old one, in order: `{"players.*.engine.device": "players.*.trainer.device"}`."""

MOVED: Mapping[str, str] = {
    f"{player}engine.{key}": f"{player}trainer.{key}"
    for player in ("", "players.*.")
    for key in ("device", "dtype", "attention", "lora", "threads")
} | {"n": "attempts"}  # of `branch`, which records no configuration
"""Old key -> present key of settings that moved and that `KEYS` can't translate: whether they did depends on the
configuration (`_move_trainer`). For the error that meets an old key in what a user writes."""

GONE: Mapping[str, str] = {
    "by": "`tapereel eval RUN --by KEY` reports the scores by label",  # of `run`
}
"""Old key -> what replaces a setting that went. For the error that meets it in what a user writes."""


def _move_trainer(data: dict[str, Any]) -> None:
    """The trainer's settings stood under `engine`, in every engine that can be trained and also where none was."""
    for group, engine in _engines(data):
        # `lora` was recorded with every such engine and no engine has it now: it tells the old layout from the new.
        if "lora" not in engine:
            continue
        keys = ("device", "dtype", "attention", "lora", "threads")
        settings = {key: engine.pop(key) for key in keys if key in engine}
        if "loop" in data and not group.get("frozen"):
            group["trainer"] = settings
        elif engine.get("kind") == "embedded":
            # An engine that only samples keeps these three.
            engine.update({key: settings[key] for key in ("device", "dtype", "threads") if key in settings})


def _rename_engines(data: dict[str, Any]) -> None:
    """`kind: vllm_inprocess` became `kind: vllm` without addresses. A default of an embedded engine was None."""
    for _, engine in _engines(data):
        if engine.get("kind") == "vllm_inprocess":
            engine["kind"] = "vllm"
        if engine.get("kind") == "embedded":
            for key in ("device", "dtype", "threads"):
                if key in engine and engine[key] is None:
                    del engine[key]


def _engines(data: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(group, its engine): of the configuration itself, and of each player."""
    players = data.get("players")
    for group in (data, *(players.values() if isinstance(players, dict) else ())):
        if isinstance(group, dict) and isinstance(group.get("engine"), dict):
            yield group, group["engine"]


def _drop_demo_constants(data: dict[str, Any]) -> None:
    """The demo had settings for two numbers that are constants now. A run with other numbers can't be read."""
    for key, value in (("context", 64), ("bad", 0.7)):
        if "demonstrations" in data and data.get(key) == value:
            del data[key]


def two_timers(limits: Group) -> Group:
    """The limits of an episode, also those of a version that had one clock: each timer gets its value."""
    if "seconds" not in limits:
        return dict(limits)
    rest = {key: value for key, value in limits.items() if key != "seconds"}
    return {"agent_seconds": limits["seconds"], "system_seconds": limits["seconds"], **rest}


def _split_clock(data: dict[str, Any]) -> None:
    for group in (data, *(data.get(key) for key in ("loop", "demonstrations", "evaluation"))):
        if isinstance(group, dict) and isinstance(group.get("limits"), dict):
            group["limits"] = two_timers(group["limits"])


def _name_shuffle(data: dict[str, Any]) -> None:
    """`loop.shuffle_rewards` was a switch: true shuffled within groups."""
    loop = data.get("loop")
    if isinstance(loop, dict) and isinstance(loop.get("shuffle_rewards"), bool):
        loop["shuffle_rewards"] = "within" if loop["shuffle_rewards"] else None


def _begin_with_base(data: dict[str, Any]) -> None:
    """The reference was always the model as the run began, also after a warm start."""
    loop = data.get("loop")
    if isinstance(loop, dict) and data.get("warm") and "reference" not in loop:
        loop["reference"] = {"model": "base"}


RULES: Sequence[Callable[[dict[str, Any]], None]] = (
    _move_trainer,
    _rename_engines,
    _drop_demo_constants,
    _split_clock,
    _name_shuffle,
    _begin_with_base,
)
"""Changes that `KEYS` can't express: each function edits a whole configuration in place, after `KEYS`. It must leave a
configuration of this version as it is."""


def moved_key(name: str) -> str | None:
    """The present key of a dotted setting that was renamed or moved (`KEYS`, `MOVED`); None for any other."""
    keys = name.split(".")
    if keys[0] != "players" or len(keys) < 2:
        return KEYS.get(name) or MOVED.get(name)
    present = MOVED.get(".".join((keys[0], "*", *keys[2:])))
    return None if present is None else present.replace("*", keys[1])


def current_path(path: str) -> str:
    """The present `module:qualname` of a class or function, or the present name of a module. Other text: unchanged."""
    module, colon, name = path.partition(":")
    return PATHS.get(path) or PATHS.get(module, module) + colon + name


def translate_config(data: Group) -> Group:
    """A recorded configuration (nested, as `config.yaml` has it) with the present keys and paths of code.

    `data` is left as it is. The configuration may be of any kind of run (`train`, `demo`, `run`).
    """
    translated: dict[str, Any] = _with_current_paths(data)
    for old, new in KEYS.items():
        for keys, names in list(_places(translated, old.split("."))):
            value = _group(translated, keys[:-1]).pop(keys[-1])
            if new is not None:
                stars = iter(names)
                *above, last = (next(stars) if key == "*" else key for key in new.split("."))
                _group(translated, above)[last] = value
    for rule in RULES:
        rule(translated)
    return translated


def is_recorded(path: Path) -> bool:
    """Whether a configuration file is the record of a run, and not a file that a user wrote.

    A run directory gets `results.json` before its `config.yaml`, so the two stand together in every run.
    """
    return path.name == "config.yaml" and path.with_name("results.json").exists()


def _with_current_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_current_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_current_paths(item) for item in value]
    return current_path(value) if isinstance(value, str) and ":" in value else value


def _places(data: Any, pattern: Sequence[str]) -> Iterator[tuple[list[str], list[str]]]:
    """(keys, the keys that the stars stand for) of each setting that fits the pattern."""
    if not isinstance(data, dict):
        return
    for key in list(data) if pattern[0] == "*" else [pattern[0]]:
        if key not in data:
            continue
        star = [key] if pattern[0] == "*" else []
        if len(pattern) == 1:
            yield [key], star
        else:
            for keys, stars in _places(data[key], pattern[1:]):
                yield [key, *keys], [*star, *stars]


def _group(data: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """The group at `keys`; made where it is missing."""
    for key in keys:
        data = data.setdefault(key, {})
    return data
