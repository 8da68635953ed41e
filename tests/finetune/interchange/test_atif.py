"""Trajectories in ATIF: what the models read and said, in the format's own types, and nothing that isn't known."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents import ChatAgent, ScriptedEngine, rollout
from tapereel.cli import main
from tapereel.cli.console import Exit
from tapereel.envs import Environment, Outcome
from tapereel.finetune.interchange import FORMATS, NothingToExport, read, write
from tapereel.tapes import Answer, Picture, Tape, Text
from tapereel.tapes.errors import UsageError
from tapereel.tapes.records import Usage
from tapereel.tapes.store import Store

from ...agents.episode.test_seeing import Player
from ...agents.picture_worlds import TURNS, Corners
from .trajectories import HOSTILE, KINDS, SAID, call, fork, pictures, program, tools
from .world import record, tapes_of

STRINGS = (
    "schema_version",
    "session_id",
    "trajectory_id",
    "notes",
    "name",
    "version",
    "model_name",
    "timestamp",
    "text",
)
SPEC: dict[str, dict[str, Any]] = {
    "trajectory": {"agent": "agent", "steps": ["step"], "final_metrics": "final", "extra": dict},
    "agent": {"tool_definitions": [dict], "extra": dict},
    "step": {
        "step_id": int,
        "source": str,
        "message": "content",
        "reasoning_content": str,
        "tool_calls": ["call"],
        "observation": "observation",
        "metrics": "metrics",
        "llm_call_count": int,
        "is_copied_context": bool,
        "extra": dict,
    },
    "call": {"tool_call_id": str, "function_name": str, "arguments": dict, "extra": dict},
    "observation": {"results": ["result"]},
    "result": {"source_call_id": str, "content": "content", "extra": dict},
    "part": {"type": str, "source": "source"},
    "source": {"media_type": str, "path": str},
    "metrics": {
        "prompt_tokens": int,
        "completion_tokens": int,
        "cached_tokens": int,
        "cost_usd": float,
        "prompt_token_ids": [int],
        "completion_token_ids": [int],
        "logprobs": [float],
    },
    "final": {
        "total_prompt_tokens": int,
        "total_completion_tokens": int,
        "total_cached_tokens": int,
        "total_cost_usd": float,
        "total_steps": int,
    },
}
"""The fields that are written, by object, with their types in the specification. A name stands for another object."""
AGENTS_ALONE = ("model_name", "reasoning_content", "tool_calls", "metrics")


def check(value: Any, wanted: Any) -> None:
    if isinstance(wanted, list):
        assert isinstance(value, list)
        assert value
        for one in value:
            check(one, wanted[0])
    elif wanted == "content":
        check(value, str if isinstance(value, str) else ["part"])
    elif isinstance(wanted, str):
        for name, one in value.items():
            check(one, str if name in STRINGS else SPEC[wanted][name])
    else:
        assert type(value) is wanted


def exported(tape: Tape, folder: Path) -> dict[str, Any]:
    """The trajectory of a tape, which is checked against the specification."""
    assert write([tape], folder / "out", "atif").records == 1
    (file,) = (folder / "out").glob("*/trajectory.json")
    made = json.loads(file.read_bytes(), parse_constant=pytest.fail)
    check(made, "trajectory")
    assert made["schema_version"] == "ATIF-v1.8"
    assert [step["step_id"] for step in made["steps"]] == list(range(1, len(made["steps"]) + 1))
    for step in made["steps"]:
        assert step["source"] in ("system", "user", "agent")
        assert step["source"] == "agent" or not set(AGENTS_ALONE) & set(step)
        assert step.get("llm_call_count") != 0 or not {"metrics", "reasoning_content"} & set(step)
        assert datetime.fromisoformat(step.get("timestamp", "2026-01-01")).year >= 2026
        known = {one["tool_call_id"] for one in step.get("tool_calls", ())}
        results = step.get("observation", {"results": []})["results"]
        assert {one["source_call_id"] for one in results if "source_call_id" in one} <= known
        for part in step["message"] if isinstance(step["message"], list) else ():
            assert ("text" in part) == (part["type"] == "text") != ("source" in part)
    return made


def plain(value: Any) -> Any:
    """Without ids, times and versions, which differ from run to run."""
    dropped = ("call", "timestamp", "began", "seconds", "versions", "version", "hash", "session_id", "trajectory_id")
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if k not in dropped}
    return [plain(one) for one in value] if isinstance(value, list) else value


def schema(name: str, about: str, **properties: str) -> dict[str, Any]:
    typed = {key: {"type": type} for key, type in properties.items()}
    asked = {"type": "object", "properties": typed, "additionalProperties": False, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": asked}}


def called(k: int, name: str, **arguments: Any) -> dict[str, Any]:
    return {"tool_call_id": f"call_{k}", "function_name": name, "arguments": arguments}


def result(k: int, name: str, content: str, **extra: Any) -> dict[str, Any]:
    return {"source_call_id": f"call_{k}", "content": content, "extra": {"name": name, **extra}}


def test_a_run_of_tools_to_the_last_field(tmp_path: Path) -> None:
    made = exported(tools(), tmp_path)
    answer = {"source": "agent", "llm_call_count": 1}
    extra = {"engine": "scripted", "finish": "stop"}
    config = made["agent"]["extra"].pop("config")
    assert config["system"] == "Be brief."
    assert plain(made) == {
        "schema_version": "ATIF-v1.8",
        "agent": {
            "name": "agent",
            "tool_definitions": [
                schema("add", "Add two numbers.", a="integer", b="integer"),
                schema("note", "", text="string"),
            ],
            "extra": {"cls": "tapereel.agents.episode.chat:ChatAgent"},
        },
        "steps": [
            {"step_id": 1, "source": "system", "message": "Be brief."},
            {"step_id": 2, "source": "user", "message": f"Add. {HOSTILE}"},
            {
                "step_id": 3,
                **answer,
                "message": "I add.",
                "reasoning_content": "Two sums.",
                "tool_calls": [called(0, "add", a=1, b=2), called(1, "add", a=-1, b=2)],
                "observation": {
                    "results": [result(0, "add", "3"), result(1, "add", "ValueError: a is negative", error=True)]
                },
                "extra": {**extra, "text": SAID[0]},
            },
            {
                "step_id": 4,
                **answer,
                "message": "",
                "tool_calls": [called(0, "note", text=HOSTILE)],
                "observation": {"results": [result(0, "note", f"noted: {HOSTILE}")]},
                "extra": {**extra, "text": SAID[1]},
            },
            {"step_id": 5, **answer, "message": SAID[2], "extra": extra},
        ],
        "final_metrics": {"total_steps": 5},
        "extra": {
            "status": "finished",
            "reward": 1.0,
            "rewards": [{"name": "right", "value": 1.0, "weight": 1.0}],
            "task": {"id": "sum", "public": "1 + 2"},
            "env": {"name": "Sums", "cls": f"{tools.__module__}:Sums"},
            "env_seed": 2,
            "seed": 1,
            "group": "g",
            "attempt": 0,
            "split": "train",
        },
    }
    last = made["steps"][-1]
    assert made["extra"]["rewards"][0]["call"] == last["extra"]["call"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tape_is_in_the_types_of_the_format_and_complete(kind: str, tmp_path: Path) -> None:
    tape = KINDS[kind]()
    made = exported(tape, tmp_path)
    asked = [call for call in tape.calls if call.finish != "error" and (call.finish != "cancelled" or call.completion)]
    answers = [step for step in made["steps"] if "call" in step.get("extra", {}) and "is_copied_context" not in step]
    assert [step["extra"]["call"] for step in answers] == [call.call for call in asked]
    assert [step["extra"].get("text", step["message"]) for step in answers] == [call.text or "" for call in asked]
    everything = json.dumps(made["steps"])
    for entry in tape.entries:
        if isinstance(entry.step, Text | Answer):
            assert json.dumps(entry.step.text)[1:-1] in everything
    for number in {step["extra"]["conversation"] for step in made["steps"] if "notes" in made}:
        mine = [step for step in made["steps"] if step["extra"]["conversation"] == number]
        for k, step in enumerate(mine):
            if "call" in step["extra"]:
                read = tape.call(step["extra"]["call"]).messages
                assert [one["message"] for one in mine[:k]] == [message["content"] for message in read]


def test_metrics_are_those_of_the_calls(tmp_path: Path) -> None:
    tape = tapes_of(record(tmp_path / "run"))[0]
    made = exported(tape, tmp_path)
    metrics = [step["metrics"] for step in made["steps"] if "metrics" in step]
    for found, one in zip(metrics, tape.calls, strict=True):
        assert one.logprobs is not None
        assert found["prompt_token_ids"] == list(one.prompt)
        assert found["completion_token_ids"] == list(one.completion or ())
        assert found["logprobs"] == pytest.approx(list(one.logprobs))
        assert found["prompt_tokens"] == one.usage.prompt_tokens
    assert made["final_metrics"]["total_completion_tokens"] == sum(one["completion_tokens"] for one in metrics)
    assert "cost_usd" not in metrics[0]
    assert "total_cost_usd" not in made["final_metrics"]


class Billed(ScriptedEngine):
    """Reports the cost of the first answer alone."""

    async def complete(self, request: Any) -> Any:
        usage = Usage(cost=0.0) if len(request.messages) == 1 else Usage(prompt_tokens=0)
        return replace(await super().complete(request), usage=usage)


class Twice(Environment[Answer]):
    async def reset(self, task: Any) -> Text:
        self.left = 1
        return Text(text="hi")

    async def step(self, action: Answer) -> Outcome:
        self.left -= 1
        return Outcome(Text(text="again"), reward={"zero": 0.0}) if self.left >= 0 else Outcome(terminated=True)


def test_zero_is_kept_and_an_unknown_number_is_left_out(tmp_path: Path) -> None:
    tape = asyncio.run(rollout(ChatAgent(), Twice, 1, engine=Billed(["a", "b"])))
    made = exported(tape, tmp_path)
    assert [step["metrics"] for step in made["steps"] if "metrics" in step] == [{"cost_usd": 0.0}, {"prompt_tokens": 0}]
    assert made["final_metrics"] == {"total_steps": 4}
    assert made["extra"]["reward"] == 0.0


def changed(tape: Tape, /, **fields: Any) -> Tape:
    """The same tape, whose records have these values in the fields that they have."""
    records = [json.loads(body) for body in tape.bodies]
    made = [one | {name: value for name, value in fields.items() if name in one} for one in records]
    return Tape.of(json.dumps(one).encode() for one in made)


def test_steps_without_calls_are_steps_that_no_model_made(tmp_path: Path) -> None:
    records = [json.loads(body) for body in tools().bodies]
    made = [one | ({"calls": []} if one["t"] == "step" else {}) for one in records if one["t"] != "call"]
    steps = exported(Tape.of(json.dumps(one).encode() for one in made), tmp_path)["steps"]
    assert [step["source"] for step in steps] == ["user", "agent", "agent", "agent"]
    assert [step.get("llm_call_count") for step in steps] == [None, 0, 0, 0]
    assert [len(step.get("tool_calls", ())) for step in steps] == [0, 2, 1, 0]
    assert [one["source_call_id"] for one in steps[1]["observation"]["results"]] == ["call_0", "call_1"]
    assert [step["extra"]["kind"] for step in steps[1:]] == ["tool_calls", "tool_calls", "answer"]


def test_an_empty_message_is_there(tmp_path: Path) -> None:
    records = [json.loads(body) for body in tools().bodies]
    for one in records:
        for message in one.get("messages", ()):
            message["content"] = []
    steps = exported(Tape.of(json.dumps(one).encode() for one in records), tmp_path)["steps"]
    assert [(step["source"], step["message"]) for step in steps[1:3]] == [("system", ""), ("user", "")]


def test_a_component_that_failed_has_no_value(tmp_path: Path) -> None:
    made = exported(changed(tools(), value="NaN"), tmp_path)
    (component,) = made["extra"]["rewards"]
    assert component["name"] == "right"
    assert "value" not in component
    assert "reward" not in made["extra"]


def test_a_program_has_its_tool_calls_with_their_results(tmp_path: Path) -> None:
    steps = exported(program(), tmp_path)["steps"]
    assert [step["source"] for step in steps] == ["system", "user", "agent", "agent", "user"]
    assert [(one["function_name"], one["arguments"]) for one in steps[2]["tool_calls"]] == [
        ("add", {"a": 1}),
        ("add", {"a": 2}),
    ]
    results = steps[2]["observation"]["results"]
    assert [one["content"] for one in results] == ["0", "1"]
    assert [one["source_call_id"] for one in results] == [one["tool_call_id"] for one in steps[2]["tool_calls"]]
    assert steps[2]["message"] == "two"
    assert steps[4]["message"] == "bye", "what no model read is there too"


def test_an_answer_that_only_quotes_a_call_stays_text(tmp_path: Path) -> None:
    quoted = f"I would write {call('add', a=1)}"
    tape = asyncio.run(rollout(ChatAgent(), Twice, 1, engine=ScriptedEngine([quoted, "b"])))
    step = next(step for step in exported(tape, tmp_path)["steps"] if step["source"] == "agent")
    assert step["message"] == quoted
    assert "tool_calls" not in step


def test_what_a_fork_inherited_is_copied_context(tmp_path: Path) -> None:
    tape = fork()
    steps = exported(tape, tmp_path)["steps"]
    own = [step for step in steps if step["source"] == "agent" and "is_copied_context" not in step]
    assert [step["extra"]["call"] for step in own] == [one.call for one in tape.calls]
    assert [step for step in steps if "metrics" in step] == own


def test_pictures_are_files_next_to_the_trajectory(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run") as store:
        asyncio.run(rollout(Player(), Corners, 1, engine=ScriptedEngine(lambda _: "1"), journal=store.writer))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--format", "atif"]) == Exit.HOLDS
    (file,) = (tmp_path / "out").glob("*/trajectory.json")
    parts = [part for step in json.loads(file.read_bytes())["steps"] for part in step["message"] if "source" in part]
    assert len(parts) == TURNS
    for part in parts:
        data = (file.parent / part["source"]["path"]).read_bytes()
        assert Picture.of(data).name == Path(part["source"]["path"]).name
    assert len(list((file.parent / "images").iterdir())) == len({part["source"]["path"] for part in parts})


def test_a_picture_without_its_file_leaves_no_folder(tmp_path: Path) -> None:
    tape = Tape.model_validate_json(pictures(Corners, 1).model_dump_json())
    with pytest.raises(ValueError, match="png"):
        write([tape], tmp_path / "out", "atif")
    assert not (tmp_path / "out").exists()


def test_no_tape_names_a_file_of_its_own(tmp_path: Path) -> None:
    tape = changed(tools(), tape="../../outside")
    exported(tape, tmp_path / "a" / "b")
    assert not list(tmp_path.glob("**/outside*"))


def test_the_command_line_says_what_is_lost(tmp_path: Path, capsys: Any) -> None:
    run = record(tmp_path / "run")
    out = tmp_path / "out"
    words = ["export", str(run), str(out), "--format", "atif", "--json"]
    assert main(words) == Exit.HOLDS
    said = capsys.readouterr()
    assert json.loads(said.out)["records"] == len(list(out.glob("*/trajectory.json"))) == 7
    assert {file.parent.name for file in out.glob("*/trajectory.json")} == {tape.id for tape in tapes_of(run)}
    assert all(sentence in said.err for sentence in FORMATS["atif"].loses)
    assert main(words) == Exit.USAGE, "the folder is there"
    for wrong in ("x.jsonl", "x.parquet"):
        with pytest.raises(UsageError, match="folder"):
            write([], tmp_path / wrong, "atif")
    with pytest.raises(NothingToExport):
        write([], tmp_path / "none", "atif")
    assert not (tmp_path / "none").exists()
    with pytest.raises(UsageError, match="atif"):
        read(out, tmp_path / "back", "atif")
    assert not (tmp_path / "back").exists()


def test_one_tape_twice_is_refused(tmp_path: Path) -> None:
    tape = tools()
    with pytest.raises(UsageError, match=tape.id):
        write([tape, tape], tmp_path / "out", "atif")
    assert not (tmp_path / "out").exists()
