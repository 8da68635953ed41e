"""The viewer: a run in the browser, from a server, as a folder of files, or as one file (`report.html`).

`RunView` answers the page's questions; `overview` computes the page that `report.html` opens with. The viewer only
reads the run. Facts of training come from a provider that `finetune` passes in. Imports `tapes` only.
"""

from .run_view import RunView

__all__ = ["RunView"]
