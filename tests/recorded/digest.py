"""The digest of a training run: its tokens, log-probs, rewards and weights, which an equal training repeats.

It reads the files of a run directory as JSON and safetensors, without the package, so it means the same for runs of all
commits.
"""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open

ORDER = ("split", "policy", "task_hash", "attempt", "seed")


def machine() -> dict[str, str]:
    """What the last bits of floating-point results depend on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    vendor = next((line.split()[-1] for line in lines if line.startswith("vendor_id")), platform.machine())
    capability = torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "transformers": transformers.__version__, "cpu": f"{vendor} {capability}"}


def digest_of(run: Path) -> dict[str, Any]:
    """The digest of the run in the directory `run`.

    `episodes`: in the order of `ORDER`, each with its status, its `calls` as [prompt, completion, log-probs] in base64
    of int32, int32 and float32, and its `rewards` as [name, value]. `policy` is the number of updates before it was
    sampled. `published`: the weights' digest in each `publish` record. `weights`: SHA-256 of the tensors of each
    checkpoint but the first, by its name.
    """
    segments = sorted((run / "tapes").glob("*.jsonl"))
    bodies = [json.loads(line)["b"] for path in segments for line in path.read_text().splitlines()]
    episodes: dict[str, dict[str, Any]] = {}
    for body in bodies:
        match body["t"]:
            case "begin":
                kept = {key: body[key] for key in ("split", "task_hash", "attempt", "seed")}
                episodes[body["tape"]] = {**kept, "calls": [], "rewards": []}
            case "call":
                episode = episodes[body["tape"]]
                (version,) = {span[0] for span in body["spans"]}
                episode["policy"] = int(version.rpartition(":")[2])
                episode["calls"].append([body["prompt"], body["completion"], body["logprobs"]])
            case "reward":
                episodes[body["tape"]]["rewards"].append([body["name"], body["value"]])
            case "end":
                episodes[body["tape"]]["status"] = body["status"]
            case _:
                pass
    files = sorted(run.glob("checkpoints/update-*/hf/model.safetensors"))
    return {
        "episodes": sorted(episodes.values(), key=lambda one: [one[key] for key in ORDER]),
        "published": [body["digest"] for body in bodies if body["t"] == "publish"],
        "weights": {path.parts[-3]: _sha256(path) for path in files},
    }


def _sha256(path: Path) -> str:
    made = hashlib.sha256()
    with safe_open(path, "pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name).contiguous()
            made.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            made.update(tensor.view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def write_digest(file: Path, found: dict[str, Any]) -> None:
    """Write a digest as JSON with one line for each episode."""
    episodes = ",\n".join(json.dumps(one) for one in found["episodes"])
    rest = json.dumps({**machine(), "published": found["published"], "weights": found["weights"]}, indent=1)
    file.write_text(f'{rest[:-2]},\n "episodes": [\n{episodes}\n ]\n}}\n')
