"""View: what a browser is given of a run, as pages of plain values, and the static files that show them.

`RunView` answers every question of the application, for a server or for a bundle on disk. Nothing is written to the
run and nothing is run. It knows nothing of HTTP, models or training; what training alone can tell comes by a provider.
"""

from .run_view import RunView

__all__ = ["RunView"]
