"""Loads settings into pydantic models from Python, a YAML, TOML or JSON file, and `key.sub=value` strings.

Strings override the file, and the file overrides Python. `load_config` returns a validated model, or raises a
`ConfigError` that names each invalid key, its origin and the nearest existing keys. An unknown key is always an error,
so a model that would ignore unknown keys is rejected. `dump_config` writes every setting, and `load_config` reads the
result back as an equal model. If this version can't read a run's `config.yaml`, the error names a version that can read
it.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, WrapSerializer, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ..errors import OtherVersion, UsageError, short_repr
from .arguments import NO_LONE, check_arguments
from .config_yaml import DEPTH, LARGEST, Group, YamlProblem, nested, read_value, read_yaml, write_yaml
from .redact import holds_secret, without_secrets

FORMAT = 1
"""Number of the format of a run's `config.yaml`, as stated in `results.json`. No other format is read."""
NAME = "NAME"
"""Placeholder for any key in a mapping of groups, as in `players.NAME.lr`."""
AT_RESUME = "at resume"
"""Context for `model_dump` when the settings of a run are compared at resume. With this context, every `FreeAtResume`
setting is written as None, so that these settings compare equal."""
FreeAtResume = WrapSerializer(lambda value, write, info: None if info.context == AT_RESUME else write(value))
"""Annotates a setting that may differ when a run is resumed, for example a server's address. These settings affect
neither samples nor updates."""
ModelT = TypeVar("ModelT", bound=BaseModel)
OriginT = TypeVar("OriginT")
Keys = tuple[str, ...]
Setting = str | tuple[str, object] | tuple[str, object, str]
"""A setting, as (key, value), (key, value, origin) or a string. The key is dotted, as in `train.lr`. Error messages
show `origin` as the source. A string has the form `KEY=VALUE`, as on a command line, and its value is read as YAML."""
_LONE = re.compile("[\ud800-\udfff]")


Item = tuple[Keys, object]
"""The keys and value of a setting."""
Translation = Callable[[Group, Keys, Any], Item | None]
"""Gets all settings of a run's `config.yaml`, and the keys and value of one. Returns the keys and value that this
setting has now, or None if it doesn't exist any more."""
_translations: list[Translation] = []


def translation(function: Translation) -> Translation:
    """Decorate the function of a module with settings that reads settings of earlier versions."""
    _translations.append(function)
    return function


def translated(values: Sequence[tuple[Keys, object, OriginT]]) -> Iterator[tuple[Keys, object, OriginT]]:
    """Yield the settings of a run's `config.yaml` with the names and values that they have now."""
    whole = nested((keys, value) for keys, value, _ in values)
    for keys, value, origin in values:
        found: Item | None = (keys, value)
        for one in _translations:
            found = one(whole, *found) if found is not None else None
        if found is not None:
            yield *found, origin


class Config(BaseModel):
    """Base class for a group of settings. It is immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
    other_names: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Names that other frameworks have for settings, with the dotted keys of these settings here. If such a name is the
    last part of an unknown key, the error suggests the settings. Only the table of the outermost class is used."""

    @model_validator(mode="before")
    @classmethod
    def _onto_defaults(cls, data: Any) -> Any:
        """Complete a group in which only some values are set. The other values come from the default of the field that
        holds the group. Pydantic would take them from the group's own class, which may have other defaults."""
        if not isinstance(data, Mapping):
            return data
        partly = {
            name: _merged(_explicit(info.default), data[name])
            for name, info in cls.model_fields.items()
            if isinstance(data.get(name), Mapping) and _is_group(info)
        }
        return {**data, **partly}

    @field_validator("*")
    @classmethod
    def _no_secret_in_an_address(cls, value: Any) -> Any:
        if any(holds_secret(text) for text in _texts(value)):
            raise ValueError(
                "an address with a user, a password or a key in it would be recorded; leave that out, and "
                "name the environment variable that holds it: with key_variable if the setting has one, otherwise in "
                "a module of your own that this setting names"
            )
        return value


def _is_group(info: FieldInfo) -> bool:
    """Return whether the field's type is a single model class and its default is an instance of this class."""
    return isinstance(info.default, BaseModel) and info.annotation is type(info.default)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        key: _merged(below[key], above[key])
        for key in below
        if isinstance(below[key], Mapping) and isinstance(above.get(key), Mapping)
    }
    return {**below, **above, **both}


def _texts(value: Any) -> Iterator[str]:
    """Yield the strings in a setting, and the keys of its mappings. Groups inside validate their own strings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for one in (*value, *value.values()) if isinstance(value, Mapping) else value:
            yield from _texts(one)


class ConfigError(UsageError):
    """The settings are invalid. The message has one line for each problem."""


def check_version(folder: Path) -> bool:
    """Return whether `folder` is a run's directory. Raises OtherVersion if another version wrote its `config.yaml`."""
    # A run directory gets `results.json` before its `config.yaml`, so a run never has `config.yaml` alone.
    path = folder / "results.json"
    if not path.is_file():
        return False
    try:
        results = json.loads(path.read_bytes())
    except (ValueError, RecursionError):  # RecursionError: deeply nested brackets
        return True  # `Results.read` reports what is wrong with the file
    found = results.get("format", 0) if isinstance(results, dict) else FORMAT
    if found != FORMAT:
        raise OtherVersion(str(folder / "config.yaml"), f"it has format {short_repr(found)}, and not {FORMAT}")
    return True


class _Layers(dict[Keys, tuple[Any, str]]):
    """The settings from all sources so far: (value, origin) by the path of keys."""

    def __init__(self) -> None:
        self.typed: dict[Keys, str] = {}
        """The text that was typed for each command-line setting. A string field gets this text: `name=123` sets
        "123"."""
        self.record: Path | None = None
        """Path of the configuration file if it is the `config.yaml` of a run, otherwise None."""

    def put(self, keys: Keys, value: Any, origin: str) -> None:
        """Set a single value. If the new value is a mapping, it is merged into the existing mapping. Otherwise it
        replaces the existing value."""
        if isinstance(value, Mapping) and (value or not keys):
            for key, item in value.items():
                self.put((*keys, str(key)), item, origin)
            return
        if any(map(_LONE.search, (*keys, *_texts(value)))):
            name = ".".join(keys)
            raise ConfigError(f"{ascii(name)[1:-1]} is {value!a:.80} ({ascii(origin)[1:-1]}); it must be {NO_LONE}")
        # The new value replaces the settings inside it, and also a value that becomes a group (`x: null`, then `x.y`).
        for other in [k for k in self if k != keys and (k[: len(keys)] == keys or keys[: len(k)] == k)]:
            del self[other]
        self[keys] = value, origin
        self.typed.pop(keys, None)

    def data(self) -> dict[str, Any]:
        return nested((keys, value) for keys, (value, _) in self.items())

    def where(self, keys: Keys) -> str:
        """Return the origin of a key, or the origin of the nearest group above it. If neither is known, return the
        origins of all settings inside the key's group. Without keys, the origin is unknown."""
        for n in range(len(keys), 0, -1):
            if keys[:n] in self:
                return self[keys[:n]][1]
        inside = {origin for key, (_, origin) in self.items() if keys and key[: len(keys)] == keys}
        return ", ".join(sorted(inside)) or "nowhere"


@check_arguments
def load_config(base: type[ModelT] | ModelT, file: str | Path | None = None, sets: Sequence[Setting] = ()) -> ModelT:
    """Load a configuration. It starts from `base`, a model class or instance. Settings in `file` override `base`, and
    `sets` override both."""
    cls = base if isinstance(base, type) else type(base)
    _refuse_open_models(cls)
    layers = _Layers()
    if not isinstance(base, type):
        layers.put((), _explicit(base), "Python")
    if file is not None:
        _add_file(layers, Path(file))
    for one in sets:
        if isinstance(one, str):
            _add_set(layers, one)
        else:
            key, value, origin, *_ = (*one, f"settings[{one[0]!r}]")
            layers.put(tuple(str(key).split(".")), value, str(origin))
    return _validate(cls, layers)


def setting_key(setting: Setting) -> str:
    """Return the dotted key of a setting."""
    return setting.partition("=")[0].strip() if isinstance(setting, str) else setting[0]


def dump_config(config: BaseModel) -> str:
    """Return every setting with its value, as YAML that `load_config` reads as an equal model. Raises ConfigError if
    the YAML is too long."""
    text = write_yaml(config.model_dump(mode="json"))
    if (size := len(text.encode())) > LARGEST:
        raise ConfigError(
            f"the settings have {size:,} bytes as YAML, and the limit is {LARGEST:,}: name a function (module:name) or "
            "a file instead of the data itself"
        )
    return text


def config_keys(cls: type[BaseModel]) -> list[str]:
    """Return every key of `cls` in dotted form, such as `train.lr`."""
    return [".".join(keys) for keys, _ in _walk(cls, (), ())]


def _add_file(layers: _Layers, path: Path) -> None:
    if path.name == "config.yaml" and check_version(path.parent):
        layers.record = path
    if path.exists() and not path.is_file():
        raise ConfigError(f"the configuration file {path} is not a regular file")
    try:
        if (size := path.stat().st_size) > LARGEST:
            raise ConfigError(f"{path} has {size:,} bytes, and a configuration has at most {LARGEST:,}")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"the configuration file {path} doesn't exist") from None
    except OSError as error:
        raise ConfigError(f"the configuration file {path} can't be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from None
    if path.suffix in (".toml", ".json"):
        try:
            values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text, object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:  # a long number, or deeply nested brackets
            raise ConfigError(f"{path} is not {path.suffix[1:].upper()}: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{path} is {short_repr(values)}, and a configuration is an object of settings")
        if _is_deep(values):
            raise ConfigError(f"{path} has more than {DEPTH} groups and lists inside each other")
        layers.put((), values, str(path))
    elif path.suffix in (".yaml", ".yml"):
        try:
            found = list(read_yaml(text))
            for keys, value, line in translated(found) if layers.record is not None else found:
                layers.put(keys, value, f"{path} line {line}")
        except YamlProblem as error:
            raise ConfigError(f"{path}: {error}") from None
    else:
        raise ConfigError(f"{path}: a configuration file ends in .yaml, .yml, .json or .toml, not {path.suffix!r}")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of one JSON object as a dict. Raises ValueError for a repeated key, because `json` would drop
    all but the last value."""
    for key, n in Counter(key for key, _ in pairs).items():
        if n > 1:
            raise ValueError(f"the key {key!r} appears {n} times in one object")
    return dict(pairs)


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(DEPTH + 1):
        inside = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [part for parts in inside for part in parts]
    return bool(level)


def _add_set(layers: _Layers, text: str) -> None:
    key, equals, raw = text.partition("=")
    keys = tuple(key.strip().split("."))
    if not equals or not all(keys):
        raise ConfigError(f"--set {text!r} is not KEY=VALUE; write it as in --set train.lr=1e-3")
    layers.put(keys, read_value(raw), f"--set {text}")
    layers.typed[keys] = raw


def _validate(cls: type[ModelT], layers: _Layers) -> ModelT:
    data = layers.data()
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        first = error
    for e in first.errors():  # a string field gets "123" from `--set name=123`
        keys = _path(data, e["loc"])
        if keys in layers.typed and e["type"] in ("string_type", "enum", "literal_error"):
            layers.put(keys, layers.typed[keys], layers.where(keys))
    data = layers.data()
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        lines = {_explain(cls, layers, data, e): layers.where(_path(data, e["loc"])) for e in error.errors()}
        record = None if layers.record is None else f"{layers.record} line "
        recorded = [line for line, where in lines.items() if record is not None and record in where]
    if recorded:
        more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
        raise OtherVersion(str(layers.record), f"{recorded[0]}{more}")
    if len(lines) == 1:
        raise ConfigError(next(iter(lines)))
    raise ConfigError(f"{len(lines)} settings are wrong:\n" + "\n".join(f"  {line}" for line in lines))


def _explain(cls: type[BaseModel], layers: _Layers, data: dict[str, Any], error: ErrorDetails) -> str:
    keys = _path(data, error["loc"])
    name = ".".join(keys) or "the configuration"
    if error["type"] == "extra_forbidden":
        inside = [".".join(key) for key in layers if key[: len(keys)] == keys]  # all of them are unknown
        return f"unknown key {name} ({layers.where(keys)}){_nearest(cls, name, inside)}"
    if error["type"] == "missing":
        return f"{'.'.join((*keys, str(error['loc'][-1])))} is not set, and has no default"
    if error["type"] == "value_error" and isinstance(error["input"], Mapping):  # the message names the group's settings
        above = f"{'.'.join(keys)}: " if keys else ""
        return without_secrets(above + error["msg"].removeprefix("Value error, "))
    where = f" ({layers.where(keys)})" if keys else ""
    says = f"{error['msg'][0].lower()}{error['msg'][1:]}"
    if error["type"] == "tuple_type":
        says = f"must be a list, such as {json.dumps([str(error['input'])])}"
    if error["type"] == "model_type":
        inside = [key for key in config_keys(cls) if key.startswith(f"{name}.")]
        says = f"is a group of settings: set {', '.join(inside)}" if inside else says
    return without_secrets(f"{name} = {error['input']!r}{where}: {says}")


def _path(data: Any, loc: Sequence[int | str]) -> Keys:
    """Return the keys in the location of a pydantic error. Names of union members aren't keys and are left out."""
    keys: list[str] = []
    for item in loc:
        listed = isinstance(data, list | tuple) and isinstance(item, int) and item < len(data)
        if listed or (isinstance(data, dict) and item in data):
            data = data[item]  # type: ignore[index]
            keys.append(str(item))
    return tuple(keys)


def _nearest(cls: type[BaseModel], name: str, inside: Sequence[str]) -> str:
    """Return a question that suggests settings for the unknown key `name`, or the keys in its group. `inside` are the
    unknown keys in full, if `name` is a group."""
    known = config_keys(cls)
    if renamed := [key for one in inside for key in _renamed(cls, known, one)]:
        return "; did you mean " + " or ".join(dict.fromkeys(renamed)) + "?"
    *above, leaf = name.split(".")
    same_leaf = [key for key in known if key.rsplit(".", 1)[-1] == leaf]
    siblings = [key for key in known if _is_beside(key.split(".")[:-1], above)]
    matches = difflib.get_close_matches(leaf, [key.rsplit(".", 1)[-1] for key in siblings], n=3, cutoff=0.6)
    close = [".".join((*above, key)) for key in matches] or same_leaf
    if not close and not siblings:
        close = difflib.get_close_matches(name, known, n=3)
    close = [key for key in dict.fromkeys(close) if key != name]
    open_group = ".".join((*above, "extra"))  # takes settings by any name, and passes them on
    sure = difflib.get_close_matches(leaf, [key.rsplit(".", 1)[-1] for key in close], cutoff=0.8)
    passed_on = f" (a setting of the engine: {open_group}.{leaf})" if open_group in known and not sure else ""
    if close:
        return "; did you mean " + " or ".join(close[:3]) + "?" + passed_on
    here = dict.fromkeys(siblings or [key for key in known if "." not in key])
    return "; the keys here are " + ", ".join(here) + passed_on


def _renamed(cls: type[BaseModel], known: Sequence[str], name: str) -> Iterator[str]:
    """Yield the settings that another framework or an earlier version calls like the last parts of `name`. A setting in
    the same group is preferred: `a.learning_rate` is `a.optimiser.lr`, and not `b.optimiser.lr`."""
    table, path = getattr(cls, "other_names", {}), name.split(".")
    n = next((n for n in range(len(path)) if ".".join(path[n:]) in table), len(path))
    for key in table.get(".".join(path[n:]), ()):
        parts = key.split(".")
        near = (".".join((*path[:n], *parts[k:])) for k in range(len(parts)))
        if parts[0] in known:
            yield next((one for one in near if any(_is_beside(k.split("."), one.split(".")) for k in known)), key)


def _is_beside(group: list[str], above: list[str]) -> bool:
    return len(group) == len(above) and all(k in (name, NAME) for k, name in zip(group, above, strict=True))


def _explicit(value: Any, whole: bool = False) -> Any:
    """Return the values that Python code set in a model, as plain groups. The model's defaults are left out.

    Literal fields are included, because they tell the members of a union apart. With `whole`, all values are included.
    This is necessary for a group that is a field's default, because missing values would be taken from other defaults.
    """
    if isinstance(value, BaseModel):
        return {
            info.alias or name: _explicit(getattr(value, name), _is_group(info))
            for name, info in type(value).model_fields.items()
            if whole or name in value.model_fields_set or get_origin(info.annotation) is Literal
        }
    if isinstance(value, dict):
        return {key: _explicit(item) for key, item in value.items()}
    return value


def _refuse_open_models(cls: type[BaseModel]) -> None:
    for model in dict.fromkeys([cls, *(model for _, inner in _walk(cls, (), ()) for model in inner)]):
        if model.model_config.get("extra") != "forbid":
            raise TypeError(
                f"{model.__qualname__} would ignore an unknown setting; give it "
                'model_config = ConfigDict(extra="forbid"), or subclass Config'
            )


def _walk(cls: type[BaseModel], above: Keys, seen: tuple[type[BaseModel], ...]) -> Iterator[tuple[Keys, list[Any]]]:
    """Yield (keys of a field, model classes in the field's type) for all fields in `cls` and in the models inside it.
    The fields of a recursive model are yielded only once."""
    for name, info in cls.model_fields.items():
        keys = (*above, info.alias or name)
        inner = list(_models(info.annotation))
        yield keys, inner
        below = (*keys, NAME) if get_origin(info.annotation) is dict else keys
        for model in inner:
            if model not in seen:
                yield from _walk(model, below, (*seen, cls))


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)
