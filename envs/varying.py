"""Removes the varying parts that an environment declares (`Environment.varies`), so that the rest can be compared."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Normalisers = Mapping[str, str | None]
"""Field (`kind.field`, with `[]` for list items; or `reward.name`) -> regular expression of the part that varies. None
stands for the whole field."""


def without(value: Any, name: str, rules: Normalisers) -> Any:
    """The plain value of the field `name`, with each varying part replaced by `…`."""
    if name in rules:
        rule = rules[name]
        return "…" if rule is None else re.sub(rule, "…", value if isinstance(value, str) else repr(value))
    if isinstance(value, dict):
        return {key: without(item, f"{name}.{key}", rules) for key, item in value.items()}
    if isinstance(value, list):
        return [without(item, f"{name}[]", rules) for item in value]
    return value
