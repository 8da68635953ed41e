"""GGUF files as models: what is read, what a run records, and what the errors say."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file

import tapereel as tr
from tapereel.cli import main
from tapereel.tapes import MissingExtra
from tapereel.tapes.common import hub, model_folder
from tapereel.tapes.common.hub import NotFound, local_folder, pinned_name
from tapereel.tapes.common.text import safe
from tapereel.tapes.errors import UsageError, brief_digests
from tapereel.tapes.store.run_directory import recorded_settings

from ..contract.tiny_gguf import save_tiny_gguf

ROOT = Path(__file__).resolve().parents[2]
DIGITS = str(ROOT / "examples" / "digits.py")
SCENE = ("--agent", f"{DIGITS}:player", "--env", f"{DIGITS}:Digits", "--tasks", f"{DIGITS}:tasks")


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield hub._gguf_cache()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("models") / "tiny.gguf"
    save_tiny_gguf(file)
    return file


def test_a_gguf_file_becomes_a_folder_once_whose_weights_are_bfloat16_numbers(tiny: Path, cache: Path):
    made = model_folder(tiny)
    assert made.parent == cache
    at = made.stat().st_ctime_ns
    assert [model_folder(tiny.parent), local_folder(pinned_name(str(tiny)))] == [made, made]
    assert made.stat().st_ctime_ns == at, "not made again"

    weights = load_file(made / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    (stored,) = [tensor for tensor in gguf.GGUFReader(tiny).tensors if tensor.name == "blk.0.ffn_down.weight"]
    exact = torch.from_numpy(gguf.quants.dequantize(stored.data, stored.tensor_type))
    assert weights["model.layers.0.mlp.down_proj.weight"].equal(exact.bfloat16())


def test_run_train_and_check_model_open_a_gguf_file_and_record_its_digest(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    short = ("loop.updates=1", "loop.groups=2", "loop.group_size=4", "loop.sampling.max_tokens=2", "evaluation.limit=2")
    sets = [word for one in short for word in ("--set", one)]
    assert main(["check", "model", str(tiny)]) == 1, "its template shows no tools"
    assert "answers end with '<|im_end|>'" in capsys.readouterr().out
    train = ["train", *SCENE, "--model", str(tiny), "--out", str(tmp_path / "run"), *sets]
    assert main(train) in (0, 1)
    assert recorded_settings(tmp_path / "run")["engine"]["model"] == pinned_name(str(tiny))
    assert main(["reproduce", str(tmp_path / "run")]) == 0
    assert main([*train, "--resume"]) in (0, 1)
    assert main(["show", str(tmp_path / "run")]) == 0
    said = "".join(capsys.readouterr())

    swapped = tmp_path / "tiny.gguf"
    save_tiny_gguf(swapped, seed=1)
    resumed = ["train", "--config", str(tmp_path / "run" / "config.yaml"), "--out", str(tmp_path / "run"), "--resume"]
    original = tiny.read_bytes()
    try:
        shutil.copy(swapped, tiny)
        assert main(resumed) == 64
    finally:
        tiny.write_bytes(original)
    said += capsys.readouterr().err
    assert "Put the original back" in said
    assert re.search(r"tiny\.gguf@[0-9a-f]{12}\b", said)
    assert not re.search("[0-9a-f]{64}", said)


def test_a_person_reads_twelve_digits_and_can_type_them(tiny: Path, tmp_path: Path):
    whole = pinned_name(str(tiny))
    short = brief_digests(whole)
    assert whole.startswith(short)
    assert len(short) == len(whole) - 52
    assert (str(UsageError(f"{whole}/x")), safe(f"the model {whole!r}")) == (f"{short}/x", f"the model {short!r}")
    assert [pinned_name(short), model_folder(short)] == [whole, model_folder(whole)]
    other = f"{tiny}@{'0' * 12}"
    with pytest.raises(UsageError, match="Put the original back"):
        model_folder(other)


def test_evaluate_takes_a_gguf_file(tiny: Path, tmp_path: Path):
    sets = {"sampling.max_tokens": 2}
    scene = (f"{DIGITS}:player", f"{DIGITS}:Digits", f"{DIGITS}:held_out")
    scores = tr.evaluate(*scene, tiny, out=tmp_path / "run", settings=sets)
    assert (scores.tasks, scores.without) == (10, 0)


@pytest.mark.parametrize("cut", [0, 20, 300, 5000, 30_000, -10])
@pytest.mark.attack
def test_a_truncated_file_is_one_error_that_names_it(tiny: Path, tmp_path: Path, cache: Path, cut: int):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny.read_bytes()[:cut])
    with pytest.raises(UsageError, match=r"broken\.gguf can't be used as a GGUF model: .*Is the file complete\?"):
        model_folder(broken)
    assert not list(cache.glob("*.part"))


@pytest.mark.attack
def test_a_file_without_one_of_its_weights_is_refused(tmp_path: Path):
    save_tiny_gguf(tmp_path / "tiny.gguf", lacking="blk.1.attn_norm.weight")
    with pytest.raises(UsageError, match=r"lacks 1 weights, such as model\.layers\.1\.input_layernorm\.weight"):
        model_folder(tmp_path)


def test_errors_name_the_missing_file_and_the_files_to_choose_from(tmp_path: Path):
    with pytest.raises(NotFound, match="no GGUF file"):
        model_folder(tmp_path / "none.gguf")
    assert local_folder(tmp_path / "none.gguf") is None
    for name in "ab":
        (tmp_path / f"{name}.gguf").touch()
    with pytest.raises(UsageError, match=r"holds 2 GGUF files: name one of them, as .*a\.gguf"):
        model_folder(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert model_folder(tmp_path) == tmp_path, "a folder in Hugging Face format"


def test_without_the_package_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_tiny_gguf(tmp_path / "new.gguf", seed=7)
    monkeypatch.setattr(hub, "find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(MissingExtra, match=r'needs the package \'gguf\'.*pip install "tapereel\[gguf\]"'):
        model_folder(tmp_path / "new.gguf")


@pytest.mark.attack
def test_two_processes_that_open_a_file_at_once_make_one_folder(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    save_tiny_gguf(tmp_path / "tiny.gguf")
    left = hub._gguf_cache() / "killed.part"
    left.mkdir(parents=True)
    code = f"from {hub.__name__} import model_folder; print(model_folder({str(tmp_path / 'tiny.gguf')!r}))"

    def opened(_: int) -> str:
        return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(opened, range(2))
    assert one == other
    assert sorted(path.name for path in hub._gguf_cache().iterdir()) == sorted(["lock", Path(one).name])
    assert (Path(one) / "model.safetensors").is_file()
