"""A team of engines: the path of who asks decides who answers."""

from __future__ import annotations

import asyncio

import pytest

from tapereel.agents import Completion, EngineError, Request, ScriptedEngine, rollout
from tapereel.agents.engines import TeamEngine
from tapereel.agents.engines.embedded import char_tokenizer
from tapereel.agents.rendering import Renderer
from tapereel.tapes import Sampling
from tapereel.tapes.errors import UsageError

from .duet import ALTO, BASS, Duet, Score


def asked(team: TeamEngine, path: str) -> str | None:
    request = Request(messages=[{"role": "user", "content": "a"}], prompt=None, sampling=Sampling(), seed=0, path=path)
    return asyncio.run(team.complete(request)).text


def test_the_path_decides_and_the_nearest_above_stands_in() -> None:
    team = TeamEngine({"pair": ScriptedEngine(lambda _: "anyone"), "pair/white": ScriptedEngine(lambda _: "white")})
    assert asked(team, "pair/white") == "white"
    assert asked(team, "pair/white/helper") == "white"
    assert asked(team, "pair/black") == "anyone"
    assert asked(team, "pair") == "anyone"
    with pytest.raises(EngineError, match=r"'other/white'.*'pair'"):
        asked(team, "other/white")


def test_the_empty_path_speaks_for_everybody_else() -> None:
    team = TeamEngine({"": ScriptedEngine(lambda _: "anyone"), "pair/white": ScriptedEngine(lambda _: "white")})
    said = [asked(team, path) for path in ("pair/white/helper", "pair/black", "other")]
    assert said == ["white", "anyone", "anyone"]


def test_texts_go_with_any_tokens_and_are_recorded_in_them() -> None:
    renderer = Renderer(char_tokenizer("abc-"))
    team = TeamEngine({ALTO: ScriptedEngine(lambda _: "b"), BASS: ScriptedEngine(lambda _: "c", renderer=renderer)})
    assert team.renderer is renderer
    tape = asyncio.run(rollout(Duet(), Score(), "b", engine=team))
    alto, bass, _ = tape.calls
    assert [renderer.decode(call.completion)[:1] for call in (alto, bass)] == ["b", "c"]
    assert alto.spans == ()
    assert alto.logprobs is None


def test_what_is_lent_stays_open() -> None:
    class Closes(ScriptedEngine):
        closed = False

        async def close(self) -> None:
            self.closed = True

    own, lent = Closes(lambda _: "a"), Closes(lambda _: "a")
    asyncio.run(TeamEngine({"a": own, "b": lent}, lent=[lent]).close())
    assert (own.closed, lent.closed) == (True, False)


def test_an_answer_that_was_cut_off_names_its_engine() -> None:
    class Slow(ScriptedEngine):
        async def complete(self, request: Request) -> Completion:
            assert request.on_partial is not None
            request.on_partial(Completion(text="a"))
            raise asyncio.CancelledError

    heard: list[Completion] = []
    request = Request(messages=[], prompt=None, sampling=Sampling(), seed=0, path="a", on_partial=heard.append)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(TeamEngine({"a": Slow(lambda _: "a")}).complete(request))
    assert heard == [Completion(text="a", engine="scripted")]


def test_engines_that_write_differently_are_refused() -> None:
    one, other = (ScriptedEngine(lambda _: "a", renderer=Renderer(char_tokenizer(w))) for w in ("ab", "abc"))
    with pytest.raises(UsageError, match="'a', 'b'"):
        TeamEngine({"a": one, "b": other})
    with pytest.raises(UsageError, match=r"\bpath\b"):
        TeamEngine({})


def test_both_are_on_one_tape_each_under_its_path() -> None:
    team = TeamEngine({ALTO: ScriptedEngine(lambda _: "b"), BASS: ScriptedEngine(lambda _: "c")})
    tape = asyncio.run(rollout(Duet(), Score(), "b", engine=team))
    assert [(call.by, call.text) for call in tape.calls] == [(ALTO, "b"), (BASS, "c"), ("duet", "b-c")]
    assert [call.engine for call in tape.calls] == ["scripted", "scripted", "authored"], "who answered, not the team"
    assert {reward.name: reward.value for reward in tape.rewards} == {f"right@{ALTO}": 1.0, f"right@{BASS}": 0.0}


@pytest.mark.parametrize("which", [0, 1])
def test_while_one_changes_its_weights_the_team_does(which: int) -> None:
    class Changes(ScriptedEngine):
        changing = False

    engines = [Changes(lambda _: "a"), Changes(lambda _: "a")]
    for engine in engines:
        engine.can |= {"weights"}
    team = TeamEngine({"a": engines[0], "b": engines[1], "c": ScriptedEngine(lambda _: "a")})
    assert not team.changing
    engines[which].changing = True
    assert team.changing
