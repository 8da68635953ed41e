"""A turn with a call, as a reward function of TRL gets it, for every family whose calls are read."""

from __future__ import annotations

from typing import Any

import pytest

from tapereel.envs.adapters.trl import as_message
from tapereel.tapes import ToolCall

from ...agents.rendering.answer_formats import ONE, OTHER, TOOLS, WRITERS, Writer

SAID = "Let me add them."


@pytest.mark.parametrize("said", ["", SAID])
@pytest.mark.parametrize("thought", ["", "It is a sum."])
@pytest.mark.parametrize("calls", [[], [ONE], [ONE, OTHER]])
@pytest.mark.parametrize("writer", WRITERS, ids=[writer.title for writer in WRITERS])
def test_text_thoughts_and_calls_are_apart(writer: Writer, calls: list[Any], thought: str, said: str) -> None:
    if calls and ((writer.format == "pythonic" and (said or thought)) or (writer.format == "llama3" and said)):
        pytest.skip("nothing marks these calls, so they are the whole answer")
    opened = "</think>\n\n" if writer.prompt and not thought else ""
    text = (writer.thought.format(thought) if thought else opened) + (writer.said.format(said) if said else "")
    if said and calls and writer.format == "gpt_oss":
        text = text.replace("final", "commentary") + "<|end|><|start|>assistant"
    text += writer.write(*calls) if calls else ""
    read = writer.reader.read(text, TOOLS, prompt=writer.prompt, end=writer.end)
    assert [call.arguments for call in read.calls] == calls
    made = tuple(ToolCall(id=str(k), name="add", arguments=one) for k, one in enumerate(calls))
    message = as_message(text, made)
    assert message["content"] == said
    assert message.get("reasoning_content", "") == thought
    assert (read.answer.strip(), read.reasoning.strip()) == (said, thought)
    assert [one["function"]["arguments"] for one in message.get("tool_calls", ())] == calls
