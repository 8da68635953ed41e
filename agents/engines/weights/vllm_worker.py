"""A weight-transfer backend with which vLLM's worker processes read new weights from files.

The server needs the flags `--worker-extension-cls tapereel.agents.engines.weights.vllm_worker.Extension
--weight-transfer-config '{"backend": "tapereel"}'`. `LocalServer(transfer=True)` adds
them. Files in /dev/shm are shared memory. The trainer writes them once, and every worker on the same machine maps
them. The server's environment needs this package, but no extras. No other module in the package imports this one.
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
"""The backend's name. Its client is in `agents/engines/weights/weight_transfer.py`."""


@dataclass
class FilesInit(WeightTransferInitInfo):
    """Has no fields, because this backend needs no parameters to connect."""


@dataclass
class FilesUpdate(WeightTransferUpdateInfo):
    """Says where one part of the weights is."""

    folder: str
    """A folder that the worker can read. It loads all `*.safetensors` files in the folder, with Hugging Face names."""


class Files(WeightTransferEngine[FilesInit, FilesUpdate]):
    """Loads weights in checkpoint format into the running model, layer by layer.

    vLLM calls start, then receive any number of times, then finish. In between, the model must not run, because its
    layers are open for new weights."""

    init_info_cls = FilesInit
    update_info_cls = FilesUpdate

    def init_transfer_engine(self, init_info: FilesInit) -> None:
        """Do nothing, because reading files needs no connection."""

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
        """Do nothing, because the backend holds no resources."""


def weights_in(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) from all files. To save memory, only one tensor is loaded at a time."""
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # the file isn't a mapping
                yield name, file.get_tensor(name)


class Extension:
    """An empty worker extension. Because of it, vLLM imports this module before the model, and the import registers the
    backend."""


# If this module is imported again, such as under another name, it must not register the backend twice.
if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, Files)
