"""`limits.keep_prompt`: whole messages are left out of long prompts, and the tape says which call lacks how many."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tapereel.agents import ChatAgent, Limits, rollout
from tapereel.agents.episode.limits import shorter_prompts
from tapereel.agents.rendering import Renderer
from tapereel.agents.replay import replay
from tapereel.envs import Environment, Outcome
from tapereel.finetune import rows
from tapereel.tapes import Answer, CauseType, Message, Status, Tape
from tapereel.tapes.common.run_async import run_async
from tapereel.tapes.transcript import call_lines

from ..rendering.seeing import QWEN, tokenizer
from .test_seeing_tokens import Babbler

RENDERER = Renderer(tokenizer(QWEN))
AGENT = ChatAgent("Be brief.", parse=lambda text: Answer(text=text))


class Rooms(Environment):
    """Six turns, each with an observation of its own."""

    turns = 0

    async def reset(self, task: object) -> str:
        return "room 0, " + "and on " * 4

    async def step(self, action: Answer) -> Outcome:
        self.turns += 1
        return Outcome(f"room {self.turns}, " + "and on " * 4, terminated=self.turns == 6)


def played(most: int, keep: Any) -> Tape:
    return run_async(
        rollout(AGENT, Rooms, 1, engine=Babbler(RENDERER), limits=Limits(prompt_tokens=most, keep_prompt=keep))
    )


@pytest.mark.parametrize("keep", ["start", "end"])
def test_a_long_prompt_keeps_the_system_prompt_the_newest_observation_and_the_generation_prompt(keep: Any) -> None:
    whole = played(10_000, keep)
    most = len(whole.calls[3].prompt)
    tape = played(most, keep)
    assert tape.status is Status.FINISHED
    assert [call.cut_messages > 0 for call in tape.calls] == [False] * 4 + [True] * 2
    ending = RENDERER.spell(RENDERER.prompt([{"role": "user", "content": "x"}]).ids).rpartition("x")[2]
    for k, call in enumerate(tape.calls):
        messages = call.messages
        said = RENDERER.spell(call.prompt)
        assert len(call.prompt) <= most
        assert messages[0] == {"role": "system", "content": "Be brief."}
        assert f"room {k}," in str(messages[-1]["content"])
        assert said.endswith(ending)
        assert len(messages) + call.cut_messages == 2 + 2 * k
    last = RENDERER.spell(tape.calls[-1].prompt)
    assert ("room 1," in last, "room 4," in last) == (keep == "start", keep == "end")
    assert sum(len(row.own) for row in rows(tape)) == sum(len(call.completion or ()) for call in tape.calls)
    assert run_async(replay(tape, AGENT, renderer=RENDERER)).outcome == "verified"
    assert [line.cut_messages for line in call_lines(tape)] == [call.cut_messages for call in tape.calls]


def test_a_prompt_that_can_not_be_shortened_ends_the_episode_with_both_numbers() -> None:
    tape = played(30, "end")
    assert tape.cause is not None
    assert (tape.status, tape.cause.type) == (Status.LIMIT, CauseType.CONTEXT)
    assert "30" in tape.cause.message


def test_replay_says_nothing_about_a_tape_whose_prompts_an_older_version_cut() -> None:
    bodies = []
    for body in played(10_000, None).bodies:
        record = json.loads(body)
        if record["t"] == "call":
            record["cut"] = 3
        bodies.append(json.dumps(record).encode())
    assert run_async(replay(Tape.of(bodies), AGENT, renderer=RENDERER)).outcome == "unverifiable"


def test_what_is_left_out() -> None:
    def chat(roles: str) -> list[Message]:
        names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
        return [{"role": names[role], "content": str(k)} for k, role in enumerate(roles)]

    def kept(roles: str, keep: Any) -> list[str]:
        return ["".join(str(m["content"]) for m in messages) for messages in shorter_prompts(chat(roles), keep)]

    assert kept("suauau", "end") == ["0145", "05"]
    assert kept("suauau", "start") == ["0145", "05"]
    assert kept("suauauau", "end") == ["014567", "0167", "07"]
    assert kept("suauauau", "start") == ["012367", "0167", "07"]
    assert kept("suattatt", "end") == ["01567"]  # the results stay with their calls
    assert kept("uau", "end") == ["2"]
    assert kept("su", "end") == kept("suat", "end") == []
