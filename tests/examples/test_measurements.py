"""Every command of docs/project/measurements.md runs, most of them in a small form."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TypeVar

import pytest

from tapereel.finetune.run import DemoConfig
from tapereel.tapes.common import dump_config

from ..finetune.loop.micro import MICRO, PICTURED

pytestmark = pytest.mark.docs
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "project" / "measurements.md").read_text(encoding="utf-8")
ConfigT = TypeVar("ConfigT", bound=DemoConfig)
HELP = "--help"
SMALL: dict[str, str | None] = {
    "tapereel demo --seed 0 --controls": "--config OUT/demo.yaml --out OUT/demo",
    "tapereel demo --pictures --seed 0": "--config OUT/pictures.yaml --out OUT/pictures",
    "tapereel demo --pictures --blind --seed 0": "--config OUT/pictures.yaml --out OUT/blind",
    "python benchmarks/gpu.py 0.6b-full --updates 2 --folder FOLDER": HELP,
    "python benchmarks/peers/trl_gpu.py FOLDER/0.6b 2": None,
    "python benchmarks/shuffled_control.py --out runs/shuffled": "--tiny --seeds 0 --updates 1 --out OUT/shuffled",
    "python benchmarks/shuffled_control.py --coin": "--tiny",
    "python benchmarks/mutate_objective.py": "recipes/imitation.py",
    "python benchmarks/rollout_cost.py --tapeagents PYTHON": "--tiny",
    "python benchmarks/paired.py OLD_CHECKOUT": "--pairs 1 --only stream",
    "python benchmarks/counts.py": HELP,
    "python benchmarks/store_commit.py --seconds 0.5": "--seconds 0.02",
    "python benchmarks/house.py [CHECKOUT]": "--places pins",
    "python benchmarks/delivery.py --updates 9 --answer TOKENS": "--updates 2",
    "python benchmarks/replay.py": "--tapes 10 --jobs 1",
    "python benchmarks/audit.py": "--tapes 24",
    "python benchmarks/store_reading.py --only-verify": "--verified 24",
    "python benchmarks/async_vs_sync.py --updates 40": HELP,
    "python benchmarks/async_vs_sync.py --updates 40 --tool-seconds 0.2": "--tiny --seeds 10 --updates 1",
    "python benchmarks/rl_update.py --tapeagents PYTHON --torchrl PYTHON": "--tiny",
    "python benchmarks/rl_update.py --tapeagents PYTHON --torchrl PYTHON --vocabulary 152000 --rows 2": HELP,
    "torchrun --nproc-per-node 4 benchmarks/ranks_memory.py": "--tiny",
    "python benchmarks/advantages.py --tapeagents PYTHON": "--tiny",
    "python benchmarks/gae.py": "--tiny",
    "python benchmarks/episode_tokens.py --tapeagents PYTHON --vocabulary 8000 --episodes 4 --reps 1 --rounds 1": (
        "--tiny"
    ),
    "python benchmarks/whole_loop.py --trl PYTHON": "--tiny",
    "python benchmarks/real_model.py MODEL --trl PYTHON --threads 2": "--threads 1",
    "python benchmarks/real_model.py MODEL --engine": "",
    "python -m pytest -m learning tests/learning/test_turn_credit.py": "--collect-only -q",
}
"""Each command of the page, with the arguments that make it small. Later ones replace earlier ones. `HELP` is for a
GPU, for counts.py, which tests/front/test_counts.py runs, and for a second command of a script. None is for a script
that needs a GPU and a peer's environment, and is compiled only."""
PLACES = {"MODEL": "", "FOLDER": "OUT", "OLD_CHECKOUT": str(ROOT), "TOKENS": "2", "[CHECKOUT]": ""}


def commands() -> list[str]:
    """The commands of the page, in blocks and in sentences."""
    blocks = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    inline = re.findall(r"`((?:python|tapereel|torchrun) [^`]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL))
    plain = [re.sub(r"^[A-Z_]+=\S+ ", "", " ".join(line.split())) for line in (*blocks, *inline)]
    return list(dict.fromkeys(plain))


def test_each_command_of_the_page_has_a_small_form() -> None:
    assert sorted(commands()) == sorted(SMALL)


@pytest.mark.parametrize("command", SMALL)
def test_the_command_runs(command: str, tmp_path: Path) -> None:
    program, *words = command.split()
    script = next((ROOT / word for word in words if word.endswith(".py")), ROOT / "cli" / "training" / "demo.py")
    source = script.read_text(encoding="utf-8")
    more = SMALL[command]
    if more is None:
        compile(source, str(script), "exec")
        return
    words = re.sub(r"--\w+ PYTHON", "", " ".join(words)).replace("--nproc-per-node 4", "--nproc-per-node 1").split()
    words = [PLACES.get(word, word) for word in (*words, *shlex.split(more))]
    words = [word.replace("OUT", str(tmp_path)) for word in words if word]
    (tmp_path / "demo.yaml").write_text(dump_config(small(MICRO)))
    (tmp_path / "pictures.yaml").write_text(dump_config(small(PICTURED)))
    modules = {"python": [], "tapereel": ["-m", "tapereel.cli"], "torchrun": ["-m", "torch.distributed.run"]}
    done = subprocess.run(
        [sys.executable, *modules[program], *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "131072"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.strip()


def small(config: ConfigT) -> ConfigT:
    """The same demo with one update of imitation and one of the loop."""
    loop = config.loop.model_copy(update={"updates": 1})
    return config.model_copy(update={"loop": loop, "warm": config.warm.model_copy(update={"updates": 1})})


TABLE = re.compile(r"^\|[-| ]+\|$", re.MULTILINE)


def test_each_table_says_when_it_was_measured() -> None:
    """With a commit or a date, which may stand in the table, and with the load if it has times."""
    for section in re.split(r"\n##+ ", PAGE)[1:]:
        if TABLE.search(section):
            assert re.search(r"\b(?=[0-9a-f]*\d)[0-9a-f]{7,8}\b|20\d\d-\d\d-\d\d", section), section[:60]
        if re.search(r"^\|.*(CPU|us/|tokens/s)", section, re.MULTILINE) and TABLE.search(section):
            assert re.search(r"\bload\b|idle|nothing else|nothing beside|busy", section), section[:60]
