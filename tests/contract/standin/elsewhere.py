"""A device that isn't the CPU, on any machine: loading this makes `torch.device("elsewhere")`.

It is made of this machine's memory (`elsewhere.cpp`), so its results are those of the CPU; but its tensors don't mix
with the CPU's and have no numpy view, autocast is on its own, and what is forgotten on the way to it is an error, as on
a GPU. What it doesn't show: kernels of a GPU, their rounding, streams and memory.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

LIBRARY = Path(os.environ["TAPEREEL_ELSEWHERE"])


class Module:
    """What `torch.elsewhere` has to have."""

    is_available = is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    manual_seed_all = staticmethod(lambda seed: None)
    get_rng_state = staticmethod(lambda device=0: torch.zeros(8, dtype=torch.uint8))
    set_rng_state = staticmethod(lambda state, device=0: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16])


torch.ops.load_library(str(LIBRARY))
torch.utils.rename_privateuse1_backend("elsewhere")
torch._register_device_module("elsewhere", Module())
