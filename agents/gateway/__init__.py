"""The gateway: any program that speaks OpenAI's protocol becomes an agent whose tapes can be replayed and trained on.

`Program` starts one per episode, inside a rollout or the loop; `tapereel serve gateway` serves programs that are
started elsewhere. Needs the extra `http`.
"""

from .gateway_control import Control
from .gateway_server import Bounds, Gateway
from .gateway_session import Session
from .linking import label_calls
from .openai_protocol import Refused
from .program import Endpoint, Program, ProgramFailed

__all__ = ["Bounds", "Control", "Endpoint", "Gateway", "Program", "ProgramFailed", "Refused", "Session", "label_calls"]
