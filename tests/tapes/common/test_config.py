"""Configuration: what goes on top of what, and what each wrong setting is answered with."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, model_validator

from tapereel.tapes.common import Config, ConfigError, dump_config, load_config, write_yaml
from tapereel.tapes.common.arguments import NO_LONE
from tapereel.tapes.common.config import Setting, config_keys
from tapereel.tapes.common.config_yaml import LARGEST, YamlProblem, read_value, read_yaml
from tapereel.tapes.errors import UsageError


class Optimiser(Config):
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.99)


class Grpo(Config):
    kind: Literal["grpo"] = "grpo"
    eps: float = 1e-9


class Cispo(Config):
    kind: Literal["cispo"] = "cispo"
    cap: float = 5.0


class Whole(Config):
    name: str = "x"
    seed: int = 0
    train: Optimiser = Optimiser()
    algo: Annotated[Grpo | Cispo, Field(discriminator="kind")] = Grpo()
    critic: Optimiser | None = None
    notes: dict[str, str | float] = Field(default_factory=dict)
    limit: float = math.inf


def _file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def _refusal(base: type[BaseModel] | BaseModel, file: Path | None = None, *sets: Setting) -> str:
    with pytest.raises(UsageError) as caught:
        load_config(base, file, sets)
    return str(caught.value)


class Sampled(Config):
    temperature: float = 1.0
    most: int = 1000


class Looped(Config):
    updates: int = 1
    sampled: Sampled = Sampled(most=64)


class Demonstrated(Config):
    looped: Looped = Looped(updates=40)
    maybe: Looped | None = None


def test_a_group_that_is_set_in_part_keeps_the_default_of_its_place(tmp_path: Path):
    whole = load_config(Demonstrated, None, ["looped.sampled.temperature=0.5"])
    assert whole.looped == Looped(updates=40, sampled=Sampled(temperature=0.5, most=64))
    assert load_config(Demonstrated, _file(tmp_path, "a.yaml", dump_config(whole))) == whole
    opened = load_config(Demonstrated, None, ["maybe.sampled.temperature=0.5"]).maybe
    assert opened == Looped(sampled=Sampled(temperature=0.5, most=64))
    mine = Demonstrated(looped=Looped(sampled=Sampled()))
    assert load_config(mine) == mine, "what is given in Python is given whole"
    assert load_config(mine, None, ["looped.updates=4"]).looped == Looped(updates=4, sampled=Sampled())


def test_a_file_goes_over_python_and_a_setting_over_the_file(tmp_path: Path):
    file = _file(tmp_path, "run.yaml", "seed: 5\ntrain:\n  lr: 1e-4\n")
    config = load_config(Whole(seed=3, train=Optimiser(betas=(0.8, 0.9))), file, ["train.lr=2e-3"])
    assert config == Whole(seed=5, train=Optimiser(lr=2e-3, betas=(0.8, 0.9)))


def test_toml_and_yaml_say_the_same(tmp_path: Path):
    yaml = _file(tmp_path, "a.yaml", "seed: 5\ntrain: {lr: 1e-4}\nalgo: {kind: cispo}\n")
    toml = _file(tmp_path, "a.toml", 'seed = 5\ntrain.lr = 1e-4\n[algo]\nkind = "cispo"\n')
    assert load_config(Whole, yaml) == load_config(Whole, toml) == Whole(seed=5, train=Optimiser(lr=1e-4), algo=Cispo())


def test_an_empty_file_and_an_untouched_model_are_the_defaults(tmp_path: Path):
    assert load_config(Whole(), _file(tmp_path, "a.yml", "# nothing\n")) == Whole()


def test_the_member_of_a_union_is_kept_from_python():
    assert load_config(Whole(algo=Cispo()), None, ["algo.cap=2"]).algo == Cispo(cap=2.0)


def test_a_setting_may_fill_what_was_null():
    assert load_config(Whole, None, ["critic.lr=0.5"]).critic == Optimiser(lr=0.5)
    assert load_config(Whole(critic=Optimiser(lr=0.5)), None, ["critic=null"]).critic is None


@pytest.mark.parametrize("text", ["123", "yes", "1e-3", "null", "true", "[a", "a: b", "", "2020-01-01"])
def test_a_text_field_takes_what_was_typed(text: str):
    assert load_config(Whole, None, [f"name={text}"]).name == text


def test_an_unknown_key_names_itself_its_place_and_the_nearest_keys(tmp_path: Path):
    file = _file(tmp_path, "run.yaml", "seed: 1\ntrain:\n  lr: 1\n  betaz: [1, 2]\n")
    assert _refusal(Whole, file) == f"unknown key train.betaz ({file} line 4); did you mean train.betas?"
    assert _refusal(Whole, None, "lr=3") == "unknown key lr (--set lr=3); did you mean train.lr or critic.lr?"
    told = _refusal(Whole, None, "train.z=1")
    assert told.startswith("unknown key train.z (--set train.z=1)")
    assert told.endswith(" train.lr, train.betas")
    assert _refusal(Whole, None, "algo.epz=1", "algo.kind=grpo").endswith("did you mean algo.eps?")


def test_a_key_of_the_other_member_of_a_union_is_unknown():
    assert _refusal(Whole, None, "algo.kind=cispo", "algo.eps=1").startswith("unknown key algo.eps (--set algo.eps=1)")


def test_a_wrong_value_names_itself_and_its_place(tmp_path: Path):
    file = _file(tmp_path, "run.yaml", "train:\n  lr: fast\n")
    assert _refusal(Whole, file).startswith(f"train.lr = 'fast' ({file} line 2): input should be a valid number")


def test_a_text_in_place_of_a_list_is_shown_the_list():
    class Listed(Config):
        targets: tuple[str, ...] = ()

    assert _refusal(Listed, None, "targets=all").endswith('(--set targets=all): must be a list, such as ["all"]')


def test_a_value_in_place_of_a_group_is_shown_its_settings():
    class Lora(Config):
        rank: int = 16

    class Trained(Config):
        lora: Lora | None = None

    said = _refusal(Trained, None, "lora=true")
    assert said.endswith("(--set lora=true): is a group of settings: set lora.rank")


def test_every_wrong_setting_is_told_at_once():
    told = _refusal(Whole, None, "sed=1", "train.lr=x")
    assert told.startswith("2 settings are wrong:\n")
    assert "unknown key sed " in told
    assert "train.lr = 'x'" in told


class Paired(Config):
    low: int = 0
    high: int = 9
    token: str = "t"

    @model_validator(mode="after")
    def _in_order(self) -> Paired:
        if self.low > self.high:
            raise ValueError(f"low={self.low} is above high={self.high}: raise high")
        return self


class Pairs(Config):
    one: Paired = Paired()


def test_settings_that_contradict_each_other_are_one_sentence_without_the_other_settings():
    assert _refusal(Paired, None, "low=10") == "low=10 is above high=9: raise high"
    assert _refusal(Pairs, None, "one.low=10") == "one: low=10 is above high=9: raise high"


class Needy(Config):
    path: str


def test_a_missing_setting_is_named():
    assert _refusal(Needy) == "path is not set, and has no default"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yaml", "seed: 1\nseed: 2\n", "line 2: the key seed was set on line 1"),
        ("a.yaml", "train:\n  lr: 1\n  lr: 2\n", "line 3: the key train.lr was set on line 2"),
        ("a.yaml", "- 1\n", "settings are `key: value` lines"),
        ("a.yaml", "a: [\n", "not YAML"),
        ("a.yaml", "name: !!python/object/apply:os.system [echo]\n", "not YAML"),
        ("a.toml", "seed = \n", "not TOML"),
        ("a.ini", "seed = 1\n", "ends in .yaml, .yml, .json or .toml, not '.ini'"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, name: str, text: str, says: str):
    assert says in _refusal(Whole, _file(tmp_path, name, text))


def test_a_file_that_is_not_there_and_one_that_is_no_text(tmp_path: Path):
    assert f"{tmp_path / 'no.yaml'} doesn't exist" in _refusal(Whole, tmp_path / "no.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in _refusal(Whole, tmp_path / "b.yaml")


@pytest.mark.parametrize("text", ["seed", "=1", ".a=1", "a..b=1"])
def test_a_setting_without_a_key_or_a_value_is_refused(text: str):
    assert "is not KEY=VALUE" in _refusal(Whole, None, text)


VALUES = [
    'it\'s "quoted"',
    "m #2",
    "a: b",
    "two\nlines\n",
    "\U0001f600 yes",
    "null",
    "1e3",
    "@home",
    "%x",
    "- [",
    " space ",
    "\x07\u2028",
    "",
]
"""Text that YAML, a shell or JSON could take for something else."""


@pytest.mark.parametrize("value", VALUES)
def test_a_value_stays_what_it_is_on_every_way(tmp_path: Path, value: str):
    whole, notes = Whole(name=value, notes={value: value}), {value: value}
    data = {"name": value, "notes": notes}
    files = [_file(tmp_path, "a.yaml", dump_config(whole))]
    files += [_file(tmp_path, f"{plain}.json", json.dumps(data, ensure_ascii=plain)) for plain in (True, False)]
    assert [load_config(Whole, file) for file in files] == [whole] * 3
    assert load_config(whole) == load_config(Whole, None, list(data.items())) == whole
    assert load_config(Whole, None, [("name", value, "--name"), ("notes", notes)]) == whole
    quoted = [f"{key}={write_yaml(one).removesuffix('...')}" for key, one in data.items()]
    assert load_config(Whole, None, quoted) == whole


@pytest.mark.parametrize("lone", ["\ud800", "a\udfffb"])
def test_a_lone_surrogate_is_refused_on_every_way(tmp_path: Path, lone: str):
    escaped = lone.encode("ascii", "backslashreplace").decode()
    yaml = _file(tmp_path, "a.yaml", f'name: "{escaped}"\n')
    json = _file(tmp_path, "a.json", f'{{"notes": {{"{escaped}": 1}}}}')
    sets: list[list[Setting]] = [[f'name="{escaped}"'], [f"name={lone}"], [("name", lone)], [("notes", {"a": [lone]})]]
    told = [_refusal(Whole, yaml), _refusal(Whole, json), *(_refusal(Whole, None, *one) for one in sets)]
    assert all(one.isascii() and NO_LONE in one for one in told), told


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"seed": 1, "train": {"lr": 1, "lr": 2}}', "'lr'"),
        ("[1]", "[1]"),
        ('{"notes": ' + '{"a": ' * 70 + "1" + "}" * 71, "64"),
        ('{"seed": "x"}', "seed"),
        ('{"seed": 1', "JSON"),
    ],
)
def test_a_json_file_is_read_as_json(tmp_path: Path, text: str, named: str):
    told = _refusal(Whole, file := _file(tmp_path, "a.json", text))
    assert str(file) in told
    assert named in told


class Open(BaseModel):
    a: int = 0


class HoldsOpen(Config):
    inner: Open = Open()


def test_a_model_that_would_ignore_an_unknown_key_is_refused():
    with pytest.raises(TypeError, match="Open would ignore an unknown setting"):
        load_config(HoldsOpen)


class Tree(Config):
    leaf: int = 0
    below: Tree | None = None


def test_a_model_inside_itself_has_finitely_many_keys():
    assert config_keys(Tree) == ["leaf", "below", "below.leaf", "below.below"]
    assert load_config(Tree, None, ["below.below.leaf=2"]) == Tree(below=Tree(below=Tree(leaf=2)))


_words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_numbers = st.floats(allow_nan=False)


@given(
    name=_words,
    seed=st.integers(),
    lr=_numbers,
    cap=_numbers,
    notes=st.dictionaries(_words, _words | _numbers),
    limit=_numbers,
)
def test_what_is_written_is_read_back_equal(tmp_path_factory, name, seed, lr, cap, notes, limit):
    config = Whole(name=name, seed=seed, train=Optimiser(lr=lr), algo=Cispo(cap=cap), notes=notes, limit=limit)
    file = tmp_path_factory.mktemp("config") / "whole.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    assert load_config(Whole, file) == config


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 1e5),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("1_000", 1000),
        ("yes", "yes"),
        ("off", "off"),
        ("true", True),
        ("null", None),
        ("[1, a]", [1, "a"]),
        ("{a: 1}", {"a": 1}),
        ("2020-01-01", "2020-01-01"),
        ("a: b: c", "a: b: c"),
    ],
)
def test_plain_values_are_read_as_in_yaml_1_2(text: str, value: object):
    assert read_value(text) == value
    assert type(read_value(text)) is type(value)


def test_a_setting_knows_its_line():
    assert list(read_yaml("a: 1\nb:\n  c: [1,\n    2]\n  d: {}\n")) == [
        (("a",), 1, 1),
        (("b", "c"), [1, 2], 3),
        (("b", "d"), {}, 5),
    ]
    assert write_yaml({"a": "yes", "b": "1e-3", "c": 1e-5}) == "a: 'yes'\nb: '1e-3'\nc: 1.0e-05\n"


HOSTILE = {
    "aliases": ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "line 2"),
    "merge keys": ("a: &a {x: 1}\nb:\n  <<: *a\n", "line 3"),
    "brackets": ("a: " + "[" * 3000 + "]" * 3000, "64"),
    "braces": ('{"a": ' * 3000 + "1" + "}" * 3000, "64"),
    "indented": ("".join(" " * k + "a:\n" for k in range(900)), "line 64"),
    "digits": ("a: " + "9" * 6000, "6,000"),
    "hexadecimal": ("a: 0x" + "f" * 900_000, "900,002"),
    "base 60": ("a: !!float 1" + ":30" * 300_000, "900,001"),
    "no integer": ("b: 1\na: !!int x", "line 2"),
    "no truth": ("b: 1\na: !!bool x", "line 2"),
    "no date": ("b: 1\na: !!timestamp 2020-13-45", "line 2"),
    "too long": ("a: '" + "x" * LARGEST + "'", f"{LARGEST + 5:,}"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_the_yaml_of_a_stranger_is_refused_before_it_is_built(name: str, tmp_path: Path):
    text, named = HOSTILE[name]
    with pytest.raises(YamlProblem, match=re.escape(named)) as caught:
        list(read_yaml(text))
    assert len(str(caught.value)) < 300
    (tmp_path / "a.yaml").write_text(text)
    (tmp_path / "a.json").write_text(text)
    for file in ("a.yaml", "a.json"):
        with pytest.raises(ConfigError, match=re.escape(str(tmp_path / file))):
            load_config(Whole, tmp_path / file)


@pytest.mark.parametrize("text", ["a = " + "[" * 3000 + "]" * 3000, "a = " + "9" * 6000, f"name = '{'x' * LARGEST}'"])
def test_a_toml_file_of_a_stranger_is_refused(text: str, tmp_path: Path):
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "a.toml"))):
        load_config(Whole, tmp_path / "a.toml")


def test_a_configuration_that_could_not_be_read_again_is_not_written():
    with pytest.raises(ConfigError, match=f"{LARGEST:,}"):
        dump_config(Whole(name="x" * LARGEST))


def test_a_value_on_the_command_line_that_is_no_yaml_is_text():
    for text in ("*a", "[&a 1, *a]", "[" * 100 + "]" * 100):
        assert read_value(text) == text
