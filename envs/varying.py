"""What may rightly differ when the same actions are taken again, as an environment declares it (`Environment.varies`).

Knows nothing of episodes: it takes declared parts out of plain values, so that the rest can be compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Normalisers = Mapping[str, str | None]
"""Field (`kind.field`, `[]` for the places of a list; `reward.name`) -> regular expression of the part that varies;
None: the whole field does."""


def without(value: Any, name: str, rules: Normalisers) -> Any:
    """The plain value of the field `name`, without what is declared to vary."""
    if name in rules:
        rule = rules[name]
        return "…" if rule is None else re.sub(rule, "…", value if isinstance(value, str) else repr(value))
    if isinstance(value, dict):
        return {key: without(item, f"{name}.{key}", rules) for key, item in value.items()}
    if isinstance(value, list):
        return [without(item, f"{name}[]", rules) for item in value]
    return value
