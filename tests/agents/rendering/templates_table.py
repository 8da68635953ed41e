"""Which chat templates let a conversation stay one row, which force new ones, why, and at what cost.

    python -m tests.agents.rendering.templates_table      writes the table into docs/concepts/rendering.md

Each family's template is played through conversations of three answers as an engine would sample them, with both
settings of `history`. A test compares the page with what is found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tapereel.agents.rendering import Renderer, Track
from tapereel.agents.rendering.renderer import RenderError

from ..families import tokenizer

PAGE = Path(__file__).resolve().parents[3] / "docs" / "concepts" / "rendering.md"
BEGIN, END = "<!-- made by tests/agents/rendering/templates_table.py -->\n", "<!-- until here -->\n"
NAMES = {
    "qwen25": "Qwen 2.5",
    "qwen3": "Qwen 3",
    "llama3": "Llama 3",
    "mistral": "Mistral",
    "gemma": "Gemma",
    "harmony": "gpt-oss (Harmony)",
    "deepseek": "DeepSeek V3.1",
    "r1": "DeepSeek R1",
    "phi3": "Phi 3",
    "llama2": "Llama 2",
    "chatml": "ChatML",
}
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look it up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}
NO_TOOLS = "doesn't show the tools to the model"
Message = dict[str, Any]


def say(role: str, content: str, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def calls(*keys: str) -> list[Message]:
    """Calls of the tool, in the chat form."""
    return [
        {"id": f"call0000{k}", "type": "function", "function": {"name": "lookup", "arguments": {"key": key}}}
        for k, key in enumerate(keys)
    ]


def results(*keys: str) -> list[Message]:
    return [say("tool", f"{key} is ripe", tool_call_id=f"call0000{k}", name="lookup") for k, key in enumerate(keys)]


@dataclass(frozen=True)
class Scenario:
    """A conversation: what is asked before each answer, and the answers."""

    name: str
    asked: tuple[list[Message], ...]
    answers: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = None


def _turns(answer: Callable[[int], str], *before: Message) -> tuple[tuple[list[Message], ...], tuple[Message, ...]]:
    asked = tuple([*(before if k == 0 else ()), say("user", f"What is {k} times 83?")] for k in range(3))
    return asked, tuple(say("assistant", answer(k)) for k in range(3))


def _tools(*keys: str) -> tuple[tuple[list[Message], ...], tuple[Message, ...]]:
    asked = ([say("user", "Which is ripe?")], results(*keys), [say("user", "And now?")])
    return asked, (say("assistant", "", tool_calls=calls(*keys)), say("assistant", "It is."), say("assistant", "No."))


SCENARIOS = (
    Scenario("answers", *_turns(lambda k: f"It is {83 * k}.")),
    Scenario("white space", *_turns(lambda k: f" It is {83 * k}. \n")),
    Scenario("thinking", *_turns(lambda k: f"<think>\nbecause {k}\n</think>\n\nIt is {83 * k}.")),
    Scenario("system prompt", *_turns(lambda k: f"It is {83 * k}.", say("system", "Be brief."))),
    Scenario("tool call", *_tools("pear"), tools=(TOOL,)),
    Scenario("parallel calls", *_tools("pear", "plum"), tools=(TOOL,)),
)


@dataclass
class Played:
    """What became of one conversation."""

    rows: int = 1
    forwarded: int = 0
    """Tokens of all rows together."""
    ids: int = 0
    """Tokens of the last prompt and answer: of one row that holds everything."""
    reasons: list[str] = field(default_factory=list)
    refused: str = ""


def sampled(name: str, renderer: Renderer, rendered: Any, reply: Message) -> list[int]:
    """What an engine would sample to say `reply`: as the template writes it, but for the spaces in JSON."""
    words = tokenizer(name)
    if reply.get("tool_calls"):
        text = words.decode(list(renderer.completion(rendered, reply))).replace('": ', '":')
        return words.encode(text, add_special_tokens=False)
    content = reply["content"]
    if rendered.text.endswith("<think>\n"):
        content = content.removeprefix("<think>\n")
    if name == "harmony":
        thought, _, said = content.rpartition("</think>")
        analysis = "<|channel|>analysis<|message|>" + thought.removeprefix("<think>") + "<|end|><|start|>assistant"
        content = (analysis if thought else "") + "<|channel|>final<|message|>" + said
    return [*words.encode(content, add_special_tokens=False), renderer.end_ids[0]]


def play(name: str, scenario: Scenario, history: Any) -> Played:
    """The conversation, answer by answer, as a door would go through it."""
    renderer, played = Renderer(tokenizer(name), history=history), Played()
    if scenario.tools and NO_TOOLS in renderer.probe():
        return Played(refused=NO_TOOLS)
    messages: list[Message] = []
    tracks: list[Track] = []
    row = 0
    try:
        for k, (asked, reply) in enumerate(zip(scenario.asked, scenario.answers, strict=True)):
            messages += asked
            rendered = renderer.prompt(messages, scenario.tools, tracks)
            if rendered.split is not None:
                played.rows, played.forwarded = played.rows + 1, played.forwarded + row
                played.reasons.append(rendered.split)
            completion = sampled(name, renderer, rendered, reply)
            told = reply if reply.get("tool_calls") else say("assistant", renderer.decode(completion))
            tracks = [renderer.track(rendered, call=str(k), reply=told, completion=completion)]
            messages.append(told)
            row = played.ids = len(rendered.ids) + len(completion)
    except RenderError as error:
        played.refused = str(error)
    played.forwarded += row
    return played


def shown(played: Played) -> str:
    """One cell."""
    if played.refused:
        return "no tools" if played.refused == NO_TOOLS else "refused"
    return "1" if played.rows == 1 else f"{played.rows} (x{played.forwarded / played.ids:.1f})"


def why(reason: str) -> str:
    """A reason without its quotations."""
    return reason.partition(": ")[0]


def table() -> str:
    """The part of the page."""
    lines = [
        "| template | " + " | ".join(scenario.name for scenario in SCENARIOS) + " |",
        "|---|" + "---|" * len(SCENARIOS),
    ]
    reasons: dict[str, set[str]] = {}
    for name, title in NAMES.items():
        cells = []
        for scenario in SCENARIOS:
            kept, literal = (play(name, scenario, history) for history in ("sampled", "template"))
            cells.append(shown(kept) if shown(kept) == shown(literal) else f"{shown(kept)} / {shown(literal)}")
            for reason in kept.reasons:
                reasons.setdefault(f"`sampled`: {why(reason)}", set()).add(title)
            for reason in literal.reasons:
                reasons.setdefault(f"`template`: {why(reason)}", set()).add(title)
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    lines += ["", "| why new rows start | with |", "|---|---|"]
    lines += [f"| {reason} | {', '.join(sorted(titles))} |" for reason, titles in sorted(reasons.items())]
    return "\n".join(lines) + "\n"


def page(text: str, made: str, *, begin: str = BEGIN, name: str = str(PAGE)) -> str:
    """The page called `name`, with `made` in its place."""
    before, found, rest = text.partition(begin)
    _, end, after = rest.partition(END)
    if not found or not end:
        raise ValueError(f"{name} has no place for the table: put {begin!r} and {END!r} there")
    return before + begin + "\n" + made + "\n" + end + after


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8"), table()), "utf-8")
