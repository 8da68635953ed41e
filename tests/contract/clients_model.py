"""A scripted model that adds with the tool that a client offers, for `--set engine.policy=FILE:adds`."""

import json
import re

from tapereel.agents import Request
from tapereel.tapes.messages import text_of


def adds(request: Request) -> str:
    """Call the tool with the numbers of the question, then say the number at the end of the tool's result."""
    last = request.messages[-1]
    if last["role"] == "tool":
        return re.findall(r"\d+", text_of(last))[-1]
    asked = "\n".join(text_of(message) for message in request.messages if message["role"] == "user")
    a, b = re.findall(r"what is (\d+) \+ (\d+)", asked)[-1]
    names = {tool["function"]["name"] for tool in request.tools or ()}
    sum_of = {"exec_command": {"cmd": f"expr {a} + {b}"}, "Bash": {"command": f"expr {a} + {b}"}}
    name = next((name for name in sum_of if name in names), "add")
    call = {"name": name, "arguments": sum_of.get(name, {"a": int(a), "b": int(b)})}
    return f"<tool_call>{json.dumps(call)}</tool_call>"
