"""Applies chat templates and tokenizers, so that conversations become prompt ids and sampled ids become text.

The package imports only `tapes`.
"""

from ...tapes.common.extras import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "renderer": "Rendered Renderer Track",
        "response_templates": "FORMATS",
        "tool_calls": "HermesReader",
    },
)
