"""Tapes: the recorded episodes of agents. An episode consists of typed steps, and each step is written as a record. The
records of one episode form a tape, and a store on disk holds the tapes of a run.

This package needs only pydantic and the standard library, and imports no other folder of Tapereel.
"""

if __name__ == "tapes":
    raise ImportError(
        "import tapereel.tapes, not tapes: the repository root is the package `tapereel` (pip install -e .)"
    )

from .errors import (
    BadPicture,
    Corrupt,
    HiddenFromAgent,
    MissingExtra,
    NotATape,
    StoreFailed,
    TapereelError,
)
from .pictures import MediaReference, Picture, Video
from .records import Call, Cause, CauseType, Message, Sampling, Status, Task
from .steps import (
    Action,
    Answer,
    Observation,
    ParseError,
    Reasoning,
    Step,
    Text,
    Thought,
    ToolCall,
    ToolCalls,
    ToolOffer,
    ToolResult,
    ToolResults,
)
from .tape import Tape

__all__ = [
    "Action",
    "Answer",
    "BadPicture",
    "Call",
    "Cause",
    "CauseType",
    "Corrupt",
    "HiddenFromAgent",
    "MediaReference",
    "Message",
    "MissingExtra",
    "ParseError",
    "NotATape",
    "Observation",
    "Picture",
    "Reasoning",
    "Sampling",
    "Status",
    "Step",
    "StoreFailed",
    "Tape",
    "TapereelError",
    "Task",
    "Text",
    "Thought",
    "ToolCall",
    "ToolCalls",
    "ToolOffer",
    "ToolResult",
    "ToolResults",
    "Video",
]
