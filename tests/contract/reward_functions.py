"""Fifty functions that score an answer. `tests/envs/test_reward_functions.py` declares each in every way, and the
environment of verifiers runs them as rewards of its own."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from statistics import mean
from typing import Any

import numpy as np


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def number(text: str) -> float | None:
    found = re.findall(r"-?\d+(?:\.\d+)?", text)
    return float(found[-1]) if found else None


def boxed(text: str) -> str:
    found = re.findall(r"\\boxed\{([^}]*)\}", text)
    return found[-1] if found else ""


def parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def f1(text: str, answer: str) -> float:
    common = sum((Counter(words(text)) & Counter(words(answer))).values())
    return 2 * common / (len(words(text)) + len(words(answer)) or 1)


def distance(a: str, b: str) -> int:
    row = list(range(len(b) + 1))
    for x in a:
        made = [row[0] + 1]
        for j, y in enumerate(b, 1):
            made.append(min(row[j] + 1, made[-1] + 1, row[j - 1] + (x != y)))
        row = made
    return row[-1]


def close(text: str, answer: str) -> float | None:
    got, want = number(text), number(answer)
    return None if got is None or want is None else math.exp(-abs(got - want))


Function = Callable[[str, str], Any]
FUNCTIONS: dict[str, Function] = {
    "equal": lambda t, a: t == a,
    "equal, stripped": lambda t, a: t.strip() == a.strip(),
    "equal without case": lambda t, a: t.casefold() == a.casefold(),
    "contains": lambda t, a: a in t,
    "ends with": lambda t, a: t.endswith(a),
    "starts with, as an integer": lambda t, a: int(t.startswith(a)),
    "first line": lambda t, a: float(t.splitlines()[:1] == [a]),
    "last line": lambda t, a: float(t.splitlines()[-1:] == [a]),
    "last number": lambda t, a: float(number(t) == number(a)),
    "near number": close,
    "boxed": lambda t, a: 1.0 if boxed(t) == a else 0.0,
    "after the mark": lambda t, a: t.rpartition("####")[2].strip() == a,
    "thoughts have an end": lambda t, a: bool(re.fullmatch(r"<think>.*?</think>.*", t, re.DOTALL)),
    "answer in tags": lambda t, a: re.findall(r"<answer>(.*?)</answer>", t) == [a],
    "number of tags": lambda t, a: 0.125 * sum(t.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>")),
    "json": lambda t, a: parsed(t) is not None,
    "json with a key": lambda t, a: isinstance(parsed(t), dict) and "answer" in parsed(t),
    "json value": lambda t, a: float((parsed(t) or {}).get("answer") == a) if isinstance(parsed(t), dict) else -1.0,
    "length": lambda t, a: -len(t) / 1000,
    "length in words": lambda t, a: len(words(t)),
    "too long": lambda t, a: -min(1.0, max(0, len(t) - 20) / 20),
    "cosine of the length": lambda t, a: 0.5 * (1 + math.cos(math.pi * min(len(t), 100) / 100)),
    "brevity": lambda t, a: 1 / (1 + len(t)),
    "words of their own": lambda t, a: len(set(words(t))) / (len(words(t)) or 1),
    "repetition": lambda t, a: -max(Counter(words(t)).values(), default=0) / (len(words(t)) or 1),
    "f1": f1,
    "recall": lambda t, a: mean([w in words(t) for w in words(a)] or [0]),
    "jaccard": lambda t, a: len({*t} & {*a}) / len({*t} | {*a} or {0}),
    "similarity": lambda t, a: difflib.SequenceMatcher(None, t, a).ratio(),
    "edit distance": lambda t, a: 1 - distance(t, a) / max(len(t), len(a), 1),
    "negative distance": lambda t, a: -distance(t, a),
    "capital": lambda t, a: t[:1].isupper(),
    "full stop": lambda t, a: t.rstrip().endswith("."),
    "ascii": lambda t, a: t.isascii(),
    "no apology": lambda t, a: -1 if "sorry" in t.lower() else 0,
    "digits": lambda t, a: sum(c.isdigit() for c in t) / (len(t) or 1),
    "balanced": lambda t, a: t.count("(") == t.count(")"),
    "either": lambda t, a: 1.0 if t == a else 0.1 if a in t else 0.0,
    "weighted": lambda t, a: 0.6 * (a in t) + 0.3 * t.isascii() + 0.1 * t[:1].isupper(),
    "no score without a number": lambda t, a: None if number(t) is None else number(t) == number(a),
    "never a score": lambda t, a: None,
    "constant": lambda t, a: 0.1,
    "tiny": lambda t, a: 1e-12 * len(t),
    "large": lambda t, a: 1e12 if a in t else -1e12,
    "minus zero": lambda t, a: -0.0,
    "numpy float": lambda t, a: np.float64(f1(t, a)),
    "numpy float32": lambda t, a: np.float32(0.1) * len(t),
    "numpy integer": lambda t, a: np.int64(len(t)),
    "numpy bool": lambda t, a: np.bool_(a in t),
    "numpy array without axes": lambda t, a: np.array(len(t) / 7),
    "numpy mean": lambda t, a: np.mean([w in words(t) for w in words(a)] or [0.0]),
}
ANSWER = "42"
TEXTS = [
    "42",
    "",
    "The answer is 42.",
    "<think>\n6 * 7 (of course)\n</think>\n\n<answer>42</answer>",
    '{"answer": "42"}',
    "Sorry, 41 or so\n#### 41 \\boxed{42}",
    "Ünïcode four-ty two two",
]
