"""The gateway serves the APIs of OpenAI and Anthropic. It makes any program an agent, and records tapes for replay and
training.

`Program` starts one program per episode, inside a rollout or the training loop. `gateway_control` serves
programs that are started elsewhere. The gateway needs the extra `http`.
"""

from ...tapes.common.extras import lazy_names
from .dialect import Refused
from .gateway_control import Control
from .gateway_server import Bounds, Gateway
from .gateway_session import Session
from .linking import label_calls
from .program import Endpoint, Program, ProgramFailed

__all__ = ["Bounds", "Control", "Endpoint", "Gateway", "Program", "ProgramFailed", "Refused", "Session", "label_calls"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "dialect": "Answered Refused",
    },
)
