"""Exchanges requests and answers with a model server (HTTP, server-sent events), checks each answer, and marks the
errors after which a retry may help.

The package imports the engine protocol and `tapes`.
"""

from ....tapes.common.extras import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "http_channel": "Server ServerFailed",
        "wire": "BadAnswer",
    },
)
