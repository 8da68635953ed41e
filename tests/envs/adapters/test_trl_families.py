"""A turn with a call, as a reward function of TRL gets it, for every family whose calls are read."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tapereel.envs.adapters.trl import as_message
from tapereel.tapes import ToolCall

from ...agents.rendering.answer_formats import ONE, OTHER, TOOLS, WRITERS, Writer

SAID = "Let me add them."
THOUGHT = "It is a sum."
WHOLE = {"pythonic": {SAID, THOUGHT}, "llama3": {SAID}}
"""What can't stand before the calls of a format: nothing marks these calls, so they are the whole answer."""


@pytest.mark.parametrize(
    ("writer", "calls", "thought", "said"),
    [
        pytest.param(*case, id=f"{writer.title}-{len(calls)}-{bool(thought)}-{bool(said)}")
        for case in product(WRITERS, ([], [ONE], [ONE, OTHER]), ("", THOUGHT), ("", SAID))
        for writer, calls, thought, said in [case]
        if not calls or WHOLE.get(writer.format, set()).isdisjoint({thought, said})
    ],
)
def test_text_thoughts_and_calls_are_apart(writer: Writer, calls: list[Any], thought: str, said: str) -> None:
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
