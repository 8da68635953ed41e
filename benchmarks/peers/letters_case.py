"""What `real_model.py` measures, for every implementation: the task, the sizes and the clock.

No tapereel here: a peer's script lies beside this file and runs in the peer's own environment.
"""

import json
import resource
import time

GROUPS, GROUP, TOKENS, LR = 8, 8, 16, 1e-5
TEXT = """apple baker candle dragon eagle forest garden hammer island jacket kettle ladder market needle orange pencil
quarter rabbit saddle table umbrella valley window yellow zebra anchor bridge castle desert engine feather
glacier harbor insect jungle kitchen lantern mirror napkin ocean pillow quilt river silver tunnel uncle velvet
wagon"""
WORDS = TEXT.split()


def question(word: str) -> str:
    return f"What is the first letter of the word {word}?"


def reward(word: str, text: str) -> float:
    """1 for the right letter, and a little for a length, so that each group has differences and everybody trains on all
    answers."""
    return float(text.strip()[:1].lower() == word[0]) + 0.01 * (len(text) % 7)


def memory(name: str) -> float:
    """A value of the process in MB, such as `VmRSS` or, since `forget_peak`, `VmHWM`."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


class Clock:
    """CPU and wall seconds of each step, and the memory above that of the imports."""

    def __init__(self) -> None:
        """Call this after the imports."""
        self.imports = memory("VmHWM")
        self.cpu, self.wall = [], []
        self.begin()

    def begin(self) -> None:
        """A step begins now."""
        self.at = (time.process_time(), time.perf_counter())

    def tick(self) -> None:
        """A step has ended, and the next begins."""
        before = self.at
        self.begin()
        self.cpu.append(self.at[0] - before[0])
        self.wall.append(self.at[1] - before[1])

    def report(self, **more: object) -> str:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        found = {"cpu": self.cpu, "wall": self.wall, "peak": peak, "above": peak - self.imports, **more}
        return json.dumps({key: _rounded(value) for key, value in found.items()})


def _rounded(value: object) -> object:
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return round(value, 2) if isinstance(value, float) else value
