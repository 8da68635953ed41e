"""YAML for settings: line numbers are kept, a repeated key is an error, and plain values follow YAML 1.2.

Plain `yes`, `no`, `on` and `off` are text, `1e-3` is a number, and dates are text. Only plain data can be read and
written. A tag that would build a Python object is an error. A file may come from a stranger, so its size, depth and
digits are limited. An alias is an error, because 600 bytes with aliases can stand for any amount of data.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import yaml

Keys = tuple[str, ...]
Group = dict[str, Any]
"""Settings as nested groups. Each value is plain data or a group."""


LARGEST = 1_000_000
"""Maximum size of a configuration in characters. For files, the limit applies to their bytes."""
DEPTH, DIGITS = 64, 1000
"""Maximum nesting of groups and lists, and maximum number of characters in a number."""


class YamlProblem(ValueError):
    """The text is not YAML with settings. The message says where."""


class _Loader(yaml.SafeLoader):
    """Reads plain data by the rules and within the limits of this module. Raises YamlProblem for anything else."""

    def __init__(self, text: str) -> None:
        if len(text) > LARGEST:
            raise YamlProblem(f"it has {len(text):,} characters, and the limit is {LARGEST:,}")
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        line = self.peek_event().start_mark.line + 1
        if self.check_event(yaml.AliasEvent):
            raise YamlProblem(f"line {line} has an alias (*name): write the value itself")
        if self._depth == DEPTH:
            raise YamlProblem(f"line {line} has more than {DEPTH} groups and lists inside each other")
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        line = node.start_mark.line + 1
        if isinstance(node, yaml.ScalarNode) and node.tag[-4:] in (":int", "loat") and len(node.value) > DIGITS:
            raise YamlProblem(f"line {line} has a number of {len(node.value):,} characters, and the limit is {DIGITS}")
        try:
            return super().construct_object(node, deep)
        except YamlProblem:
            raise
        except (ValueError, LookupError, AttributeError, ArithmeticError) as error:  # `!!bool x`, `!!timestamp x`
            raise YamlProblem(f"line {line} has a value that doesn't fit its tag {node.tag}") from error


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` or a standard YAML loader would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def text(self, data: str) -> yaml.ScalarNode:
        # Readers fold these rare line breaks into spaces, unless the text is in double quotes.
        quoted = any(c in "\x85\u2028\u2029\ufeff" for c in data)
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if quoted else None)


_Dumper.add_representer(str, _Dumper.text)
# By default, PyYAML follows YAML 1.1, in which `no` is false and `1e-3` is text.
_OURS = {
    "tag:yaml.org,2002:bool": (re.compile(r"(true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    "tag:yaml.org,2002:float": (
        re.compile(
            r"([-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
            r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
        ),
        "-+.0123456789",
    ),
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, rule) for tag, rule in rules if tag not in _OURS and not tag.endswith(":timestamp")]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, (_rule, _first) in _OURS.items():
    _Loader.add_implicit_resolver(_tag, _rule, list(_first))
    _Dumper.add_implicit_resolver(_tag, _rule, list(_first))


def read_yaml(text: str) -> Iterator[tuple[Keys, object, int]]:
    """Yield (keys, value, line) for each setting in a document, in order. A list counts as one value."""
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return
        if not isinstance(root, yaml.MappingNode):
            found = "list" if isinstance(root, yaml.SequenceNode) else "value"
            raise YamlProblem(f"line {root.start_mark.line + 1} begins a {found}: settings are `key: value` lines")
        yield from _settings(loader, root, ())
    except yaml.YAMLError as error:
        raise YamlProblem(f"not YAML: {' '.join(str(error).split())}") from None


def nested(settings: Iterable[tuple[Keys, object]]) -> Group:
    """Return nested groups for a sequence of (path of keys, value) pairs. `settings_of` is the inverse."""
    data: Group = {}
    for keys, value in settings:
        group = data
        for key in keys[:-1]:
            group = group.setdefault(key, {})
        group[keys[-1]] = value
    return data


def settings_of(data: Mapping[str, object], above: Keys = ()) -> Iterator[tuple[Keys, object]]:
    """Yield (keys, value) for each setting in nested groups. An empty group counts as a value."""
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from settings_of(value, (*above, key))
        else:
            yield (*above, key), value


def read_value(text: str) -> object:
    """Return the value that `text` would have after `key: ` in a file. Empty or invalid text is returned unchanged."""
    try:
        return yaml.load(text, _Loader) if text.strip() else text
    except (yaml.YAMLError, YamlProblem):
        return text


def write_yaml(data: object) -> str:
    """Return `data` as YAML, in the order of its keys."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _settings(loader: _Loader, node: yaml.MappingNode, above: Keys) -> Iterator[tuple[Keys, Any, int]]:
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        key, line = str(loader.construct_object(key_node, deep=True)), key_node.start_mark.line + 1
        if key in seen:
            raise YamlProblem(f"line {line}: the key {'.'.join((*above, key))} was set on line {seen[key]} already")
        seen[key] = line
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            yield from _settings(loader, value_node, (*above, key))
        else:
            yield (*above, key), loader.construct_object(value_node, deep=True), line
