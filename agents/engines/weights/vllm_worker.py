"""A weight-transfer backend for vLLM's worker processes, which reads new weights from files.

The server needs the flags `--worker-extension-cls tapereel.agents.engines.weights.vllm_worker.Extension
--weight-transfer-config '{"backend": "tapereel"}'`. `LocalServer(transfer=True)` and `tapereel serve model --transfer`
add them. Files in /dev/shm are shared memory, which the trainer writes once and every worker on that machine maps. The
server's environment needs this package without extras. The rest of the package does not import this module.
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
"""The name of the backend. The client is in `agents/engines/weights/weight_transfer.py`."""


@dataclass
class FilesInit(WeightTransferInitInfo):
    """Has no fields, because the file backend needs no connection parameters."""


@dataclass
class FilesUpdate(WeightTransferUpdateInfo):
    """The location of one part of the weights."""

    folder: str
    """A folder that the worker can read. The worker loads all `*.safetensors` files in it, by Hugging Face names."""


class Files(WeightTransferEngine[FilesInit, FilesUpdate]):
    """Loads weights in checkpoint format into the running model, layer by layer.

    The order of calls is start, any number of receive calls, and finish. Between start and finish the model must not
    run, because its layers are open for new weights."""

    init_info_cls = FilesInit
    update_info_cls = FilesUpdate

    def init_transfer_engine(self, init_info: FilesInit) -> None:
        """Do nothing, because files need no connection."""

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
    """Yield (name, tensor) from all files. Only one tensor is loaded at a time, which bounds the worker's memory."""
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # the file isn't a mapping
                yield name, file.get_tensor(name)


class Extension:
    """An empty extension of vLLM's worker. vLLM imports this module before the model, which registers the backend."""


# A second import, such as under another module name, must not register the backend again.
if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, Files)
