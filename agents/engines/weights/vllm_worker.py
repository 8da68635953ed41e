"""Runs inside vLLM's worker processes: a weight-transfer backend that reads new weights from files.

`--worker-extension-cls tapereel.agents.engines.weights.vllm_worker.Extension
--weight-transfer-config '{"backend": "tapereel"}'`, which
`LocalServer(transfer=True)` and `tapereel serve model --transfer` add. Files in /dev/shm are shared memory: the trainer
writes them once and every worker of that machine maps them. The environment of the server needs this package, none of
its extras. Knows nothing of engines and requests; nothing here is imported by the rest of the package.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "tapereel"
"""The name of the backend; `agents/engines/weights/weight_transfer.py` has the client's side of it."""


@dataclass
class FilesInit(WeightTransferInitInfo):
    """Nothing has to be agreed on."""


@dataclass
class FilesUpdate(WeightTransferUpdateInfo):
    """One part of the weights."""

    folder: str
    """A folder that the worker can read; all `*.safetensors` in it are loaded, by Hugging Face names."""


class Files(WeightTransferEngine[FilesInit, FilesUpdate]):
    """Layer by layer into the running model, in the format of checkpoints."""

    init_info_cls = FilesInit
    update_info_cls = FilesUpdate

    def init_transfer_engine(self, init_info: FilesInit) -> None:
        """Nothing has to be opened."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FilesUpdate) -> None:
        files = sorted(Path(update_info.folder).glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"there are no *.safetensors in {update_info.folder}; can this machine read it?")
        self.model.load_weights(weights_in(files))  # type: ignore[operator]

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is held."""


def weights_in(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of all files, one tensor in memory at a time."""
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # no mapping
                yield name, file.get_tensor(name)


class Extension:
    """What vLLM adds to its worker: nothing. Importing this module, ahead of the model, registers the backend."""


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, Files)
