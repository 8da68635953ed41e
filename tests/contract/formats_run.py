"""Run by the Python of the TRL environment: `formats_run.py FOLDER`. The classes of OpenEnv and the functions of
verifiers read what we exported, and write it again."""

import importlib.util
import json
import sys
import types
from pathlib import Path


def real_trace():
    """OpenEnv's own TrainingTrace. Its package is entered by the back door: the front imports servers and clients."""
    home = Path(importlib.util.find_spec("openenv").origin).parent
    for name in ("openenv", "openenv.core", "openenv.core.harness", "openenv.core.harness.capture"):
        module = types.ModuleType(name)
        module.__path__ = [str(home.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = module
    from openenv.core.harness.training import TrainingTrace

    return TrainingTrace


def main(folder: Path) -> None:
    trace = real_trace()
    traces = [trace.model_validate_json(line) for line in (folder / "traces.jsonl").read_text().splitlines()]
    again = [trace.from_entries(one.to_trace_entries()) for one in traces]
    (folder / "theirs.jsonl").write_text("".join(one.model_dump_json() + "\n" for one in again))
    from verifiers.utils.save_utils import load_outputs, save_outputs

    outputs = load_outputs(folder / "rollouts")
    save_outputs(outputs, folder / "theirs")
    steps = [step["tokens"] for one in outputs for step in one["trajectory"] if step["tokens"]]
    tokens = sum(len(step["completion_ids"]) for step in steps)
    (folder / "told.json").write_text(
        json.dumps(
            {
                "tokens": tokens,
                "reward": sum(one["reward"] for one in outputs),
                "turns": sum(len(t.turns) for t in traces),
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
