"""The viewer shows a run in the browser, either from a server or as one file (`report.html`).

`RunView` answers the page's questions, and `overview` computes the page that `report.html` opens with. The viewer only
reads the run. Facts about training come from a provider that `finetune` passes in. This folder imports only `tapes`.
"""

from ..common.extras import lazy_names
from .run_view import RunView

__all__ = ["RunView"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "bundle": "write_view",
        "overview": "Overview overview_of",
        "runs": "Runs",
        "view_server": "Server",
    },
)
