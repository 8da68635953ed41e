"""The gateway: any program that speaks OpenAI's protocol becomes an agent whose tapes can be replayed and trained on.

`Program` starts one per episode, inside a rollout or the loop; `tapereel gateway` serves those that somebody else
starts. Needs the extra `http`.
"""

from .control import Control
from .linking import label_calls
from .program import Endpoint, Program, ProgramFailed
from .protocol import Refused
from .server import Bounds, Gateway
from .session import Session

__all__ = ["Bounds", "Control", "Endpoint", "Gateway", "Program", "ProgramFailed", "Refused", "Session", "label_calls"]
