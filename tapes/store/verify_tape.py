#!/usr/bin/env python3
"""Check the segments of a Tapereel run with the standard library alone. It shares no code with Tapereel.

    python verify_tape.py RUN [--pin SEGMENT:HASH] ...

The segments RUN/tapes/000001-<6 hex>.jsonl, 000002-... and so on have one line for each record, in this format:
    {"n":0,"c":0,"p":"<64 hex>","b":{...},"h":"<64 hex>"}
n is the number of the line, from 0, and c is the number of lines that were durable when this line was written.
h is the SHA-256 of the line's bytes before its last ,"h":
p is the h of the previous line. In the first line, it is 64 zeros or one of the heads that b pins.
The first b is {"t":"open","segment":...,"pins":{segment: head}}. A head, like the HASH of a --pin, is the h of a line
that the segment must have. A `commit` or `seal` has the h of the first line as "opened". A seal is its segment's last
line, and its c equals its n. A tape's digest d begins as SHA-256("tapereel/1"). Then each `begin`, `step`, `call` and
`reward` record of the tape, and at last its first `end`, changes d to SHA-256(d + b), where b is the record's bytes.

The exit code is 0 if all lines are whole and chained and every pin is met, 1 if durable bytes changed, and 2 if neither
is certain (a torn tail, a missing segment that nothing pins, or no segments). RUN/pins.json is read if it exists.
Unlike `verify`, this script counts any intact line after a break as evidence, even an old one of another file.
"""

import hashlib
import json
import os
import re
import stat
import sys
from pathlib import Path

HEAD = re.compile(rb'\{"n":(\d+),"c":(\d+),"p":"([0-9a-f]{64})","b":(?=\{)')
TAPE_RECORDS = ("begin", "step", "call", "reward", "end")


def read_line(raw: bytes) -> tuple:
    """Return (n, c, p, body bytes, record, h) from a line. Raises ValueError if it isn't a line."""
    match, cut = HEAD.match(raw), raw.rfind(b',"h":')
    if not match or not re.fullmatch(rb',"h":"[0-9a-f]{64}"\}\n', raw[cut:]):
        raise ValueError("not a line")
    h = hashlib.sha256(raw[:cut]).hexdigest()
    if h != raw[cut + 6 : -3].decode():
        raise ValueError("its hash doesn't match its bytes")
    body = raw[match.end() : cut]
    record = json.loads(body)
    if not isinstance(record.get("t"), str):
        raise ValueError("its body isn't a record")
    return int(match[1]), int(match[2]), match[3].decode(), body, record, h


def can_stand(line: tuple, name: str, state: tuple) -> bool:
    """Return whether an intact line can be the next one after `state` in segment `name`."""
    (n, c, p, _, record, _), (lines, head, frontier, sealed, first) = line, state
    if sealed or n != lines or not frontier <= c <= n:
        return False
    if n == 0:
        pinned = record.get("pins")
        ours = record["t"] == "open" and record.get("segment") == name and isinstance(pinned, dict)
        return ours and (p == head or p in pinned.values())
    if record["t"] in ("commit", "seal") and record.get("opened") != first:
        return False
    return p == head and record["t"] != "open" and (record["t"] != "seal" or c == n)


def read_segment(path: Path, run: dict) -> dict:
    """Check one file. Add its hashes, pins and tapes to `run`, and return a summary of the file."""
    name, state, broken = path.stem, (0, "0" * 64, 0, False, ""), None
    run["hashes"][name] = set()
    with path.open("rb") as file:
        for raw in file:
            try:
                line = read_line(raw)
                if broken is None and not can_stand(line, name, state):
                    broken = f"line {state[0]} is another"
            except (ValueError, RecursionError) as error:
                line, broken = None, broken or f"line {state[0]}: {error}"
            if broken is None and line is not None:
                state = (state[0] + 1, line[5], line[1], line[4]["t"] == "seal", state[4] or line[5])
                take(line, name, run)
            elif state[3] or (line and (line[1] > state[0] or line[4]["t"] == "seal" or line[:2] == 2 * state[:1])):
                run["corrupt"].append(f"segment {name}, {broken}, and that place was durable")
                break
        else:
            run["torn"] += [f"segment {name}, {broken}"] if broken else []
    return {"lines": state[0], "head": state[1], "sealed": state[3], "broken": broken}


def take(line: tuple, name: str, run: dict) -> None:
    n, _, _, body, record, h = line
    run["hashes"][name].add(h)
    run["pins"] += list(record["pins"].items()) if n == 0 else []
    tape = record.get("tape")
    if record["t"] in TAPE_RECORDS and tape not in run["closed"]:
        before = run["digests"].get(tape, hashlib.sha256(b"tapereel/1").digest())
        run["digests"][tape] = hashlib.sha256(before + body).digest()
        run["closed"] |= {tape} if record["t"] == "end" else set()


def check(folder: Path, pins: list) -> tuple[int, dict]:
    run = {"hashes": {}, "pins": list(pins), "digests": {}, "closed": set(), "corrupt": [], "torn": []}
    files = [folder / "pins.json", *sorted((folder / "tapes").glob("[0-9]*-*.jsonl"))]
    # Only regular files are opened. A pipe would wait for a writer, and a link could lead to a file without an end.
    odd = [path for path in files if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode)]
    run["corrupt"] += [f"{path} isn't a regular file" for path in odd]
    if files[0].exists() and files[0] not in odd:
        run["pins"] += list(json.loads(files[0].read_text()).items())
    segments = {path.stem: read_segment(path, run) for path in files[1:] if path not in odd}
    run["corrupt"] += [
        f"segment {name} does not hold the pinned {h}"
        for name, h in dict.fromkeys(run["pins"])
        if h not in run["hashes"].get(name, ())
    ]
    numbers = {int(name[:6]) for name in segments}
    holes = sorted(set(range(1, max(numbers, default=0))) - numbers)
    code = 1 if run["corrupt"] else 2 if run["torn"] or holes or not segments else 0
    return code, {
        "verdict": ("holds", "broken", "undecided")[code],
        "corrupt": run["corrupt"],
        "torn": run["torn"],
        "holes": holes,
        "segments": segments,
        "records": sum(s["lines"] for s in segments.values()),
        "tapes": {tape: digest.hex() for tape, digest in run["digests"].items()},
        "open": sorted(set(run["digests"]) - run["closed"]),
        "not checked": ["the meaning of the records", "media files", "the books"]
        + ([] if run["pins"] else ["a tail cut off, or everything rewritten: only a pin shows that"]),
    }


def main(arguments: list[str]) -> int:
    pins = [tuple(arguments[i + 1].split(":")) for i, word in enumerate(arguments) if word == "--pin"]
    code, report = check(Path(arguments[0]), pins)
    print(json.dumps(report, indent=2))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) if len(sys.argv) > 1 else print(__doc__) or 64)
