"""vLLM inside a process: sampled from, published to and cancelled as over HTTP, in the environment that has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from tapereel.tapes import Status
from tapereel.tapes.store.store import Store
from tapereel.tapes.store.verifier import verify

from ..agents.embedded_lab import recompute
from ..agents.served import CLOSE
from ..finetune.loop.versions import assert_versions_true
from .lab import adapted, merged, policy, run_in_vllm

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]


def off(model: Any, answer: dict[str, Any], start: int, end: int) -> float:
    """The largest error of its log-probs in [start, end), in nats."""
    exact = recompute(model, answer["prompt"], answer["ids"], answer["temperature"])[start:end].tolist()
    return max(abs(a - b) for a, b in zip(exact, answer["logprobs"][start:end], strict=True))


def test_an_engine_in_process_keeps_the_contract_of_engines(folder: Path, tmp_path: Path) -> None:
    save_file({name: tensor.clone() for name, tensor in policy(1).state_dict().items()}, tmp_path / "other.safetensors")
    adapters = {name: tensor for name, tensor in adapted(1).state_dict().items() if "lora_" in name}
    save_file(adapters, tmp_path / "adapters.safetensors")
    script = Path(__file__).with_name("inprocess_run.py")
    printed = run_in_vllm(
        script, str(folder), str(tmp_path / "other.safetensors"), str(tmp_path / "adapters.safetensors")
    )
    found = json.loads(printed.splitlines()[-1])
    assert found["server"] == "vLLM 0.32.0"
    models = {"other": policy(1), "1": merged(1)}
    for answer in found["sampled"]:
        assert answer["spans"]
        for version, start, end in answer["spans"]:
            model = models.get(version.rsplit("/", 1)[-1], policy(0))
            assert off(model, answer, start, end) < CLOSE, (answer["what"], version)
    by_kind = {
        what: [a for a in found["sampled"] if a["what"] == what]
        for what in ("plain", "cancelled", "reprefill", "abort", "adapter")
    }
    assert by_kind["plain"][1]["ids"] == by_kind["plain"][2]["ids"], "the same seed, the same tokens"
    assert by_kind["plain"][1]["ids"] == by_kind["plain"][3]["ids"], "whether somebody listens or not"
    (cancelled,) = by_kind["cancelled"]
    assert cancelled["finish"] == "cancelled"
    assert 0 < len(cancelled["ids"]) < 3600
    assert sum(len(answer["spans"]) > 1 for answer in by_kind["reprefill"]) >= 2, "by reload and by transfer"
    assert any(answer["finish"] == "abort" for answer in by_kind["abort"])
    assert by_kind["adapter"][0]["spans"] == [["adapter/1", 0, 48]]
    assert len(found["told"]) == 3


@pytest.mark.parametrize("publish", ["reload", "transfer"])
def test_train_samples_from_an_engine_in_its_process(folder: Path, tmp_path: Path, publish: str) -> None:
    run = tmp_path / "run"
    printed = run_in_vllm(
        Path(__file__).with_name("inprocess_train.py"), str(folder), str(run), str(tmp_path / "weights"), publish
    )
    found = json.loads(printed.splitlines()[-1])
    for summary in (found["trained"], found["resumed"]):
        assert (summary["updates"], summary["books_close"]) == (3, True)
        assert summary["held_out"]["after"] is not None
    assert found["resumed"]["episodes"] == found["trained"]["episodes"], "a resume of what is done adds nothing"
    assert found["verify"] == 0
    assert verify(run).exit_code == 0
    with Store.open(run) as store:
        published = [stored.record for stored in store.run_records("publish")]
        tapes = list(store.tapes(split="train"))
    lineage = found["trained"]["lineage"]
    assert [record.version for record in published] == [f"{lineage}:{k}" for k in range(4)]
    assert {tape.status for tape in tapes} <= {Status.FINISHED, Status.CANCELLED}
    assert_versions_true(run, tmp_path / "fresh", folder, lineage, 3)
    assert len({version for tape in tapes for call in tape.calls for version, _, _ in call.spans}) > 1
