"""TapeAgents' advantages of so many rows; run by its own Python (`advantages.py --tapeagents PYTHON`)."""

import json
import sys
import time

from advantage_case import columns
from datasets import Dataset, disable_progress_bars
from tapeagents.finetune.rl import RLConfig, update_rewards_and_advantages

disable_progress_bars()
dataset = Dataset.from_dict(columns(int(sys.argv[1])))
cpu, wall = time.process_time(), time.perf_counter()
done = update_rewards_and_advantages(dataset, RLConfig())
cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
print(json.dumps({"cpu": cpu, "wall": wall, "second": [row[1] for row in done["advantages"]]}))
