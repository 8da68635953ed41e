"""The command line, with one thin module per verb.

A verb reads its arguments, calls one library function that a Python user can call too, and prints the answer.
`command.main` runs the verb. No library module imports this package, and no verb imports another verb.
"""

from . import remedies  # noqa: F401  # errors then name commands and settings
from .command import VERBS, load, main, verb_parser

__all__ = ["VERBS", "load", "main", "verb_parser"]
