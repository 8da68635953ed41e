"""Fuzzing everything that reads bytes of a run: mutated segments, one execution each.

    python -m tests.tapes.store.fuzz 1000000 [seed]

An execution reads one segment to its end, judges the break, parses every record and feeds the books and, one time in
ten, the index. Whatever the bytes are, it ends with lines or with an error of ours: nothing else, and no hang.
"""

from __future__ import annotations

import io
import random
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tapereel.tapes import TapereelError
from tapereel.tapes.schema import parse_record
from tapereel.tapes.store import encode_line, peek, reader
from tapereel.tapes.store.books import BooksFold
from tapereel.tapes.store.index import Index
from tapereel.tapes.store.reader import SegmentReader
from tapereel.tapes.store.segment import parse_line

from .lab import Lab

CORPUS = Path(__file__).parent / "fuzz_corpus"
TOKENS = (
    b'{"n":',
    b',"c":',
    b',"p":"',
    b'","b":',
    b',"h":"',
    b'"}\n',
    b"\n",
    b"{",
    b"}",
    b"[",
    b'{"t":"open"',
    b'"',
    b"\\",
    b'{"t":"commit","opened":"',
    b'{"t":"begin","tape":"',
    b'{"t":"end","tape":"',
    b'{"t":"call"',
    b'"tape":null',
    b"NaN",
    b"1e999",
    b"0" * 64,
    b"9" * 20,
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"null",
    b"media:" + b"a" * 64,
    b"\\u0000",
    b'{"t":"seal"',
    b"-1",
)


class OneFile:
    """A disk that holds one segment."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def names(self, folder: Path) -> list[str]:
        return ["000001-abcdef.jsonl"]

    def size(self, path: Path) -> int:
        return len(self.data)

    def open(self, path: Path) -> io.BytesIO:
        return io.BytesIO(self.data)


def execute(data: bytes, segment: str = "000001-abcdef", *, index: bool = True) -> str:
    """One execution; gives how it ended. Any exception but ours comes out."""
    lines = SegmentReader(Path("/run/tapes"), segment, disk=OneFile(data))  # type: ignore[arg-type]
    books = BooksFold()
    ended = "whole"
    for _, line, _ in lines:
        try:
            peek(line.body)
            books.add(line.body)
        except TapereelError as error:
            ended = type(error).__name__
        try:
            parse_record(line.body)
        except (TapereelError, ValidationError) as error:
            ended = type(error).__name__
    books.books()
    if index:
        try:
            Index(Path("/run/tapes"), disk=OneFile(data)).refresh()  # type: ignore[arg-type]
        except TapereelError as error:
            ended = type(error).__name__
    broken = lines.broken()
    return broken.verdict if broken is not None else ended


def mutate(rng: random.Random, seeds: list[bytes]) -> bytes:
    """A seed with a few changes; every other time with the hashes put right again, to get past them."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(7):
            case 0 if data:
                data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
            case 1:
                data[at:at] = rng.choice(TOKENS)
            case 2:
                del data[at : at + rng.randint(1, 80)]
            case 3:
                other = rng.choice(seeds)
                start = rng.randrange(len(other) + 1)
                data[at:at] = other[start : start + rng.randint(1, 400)]
            case 4:
                data[at : at + rng.randint(1, 8)] = rng.randbytes(rng.randint(1, 8))
            case 5:
                token = rng.choice(TOKENS)
                data[at : at + len(token)] = token
            case _:
                del data[at:]
    return rehash(bytes(data)) if rng.random() < 0.5 else bytes(data)


def rehash(data: bytes) -> bytes:
    """The bodies of the lines, such as they are, in a sound chain: what a forger would write."""
    out: list[bytes] = []
    head = b"0" * 64
    for n, raw in enumerate(data.split(b"\n")[:-1]):
        start, end = raw.find(b'"b":'), raw.rfind(b',"h":"')
        body = raw[start + 4 : end] if 0 <= start < end else raw
        line, head = encode_line(n, max(n - 1, 0), head, body)
        out.append(line)
    return b"".join(out)


def seeds() -> list[bytes]:
    """Small sound segments with every kind of record, and the corpus."""
    lab = Lab()
    bodies: list[bytes] = [b'{"t":"open","segment":"000001-abcdef","pid":1,"at":0.0,"pins":{},"versions":{}}']
    bodies += list(lab.episode("a"))
    bodies += [lab.use(0, [("a", "a.1", 0, 4, 0.25)], stale=[["a", "a.1", 0, 1]]), lab.begin("b")]
    bodies += [
        lab.records.Void(lineage="main", update=0, into="next", reason="test").body(),
        lab.records.Publish(version="main:1", digest="d", at=0.0).body(),
        lab.records.Label(tape="a", call="a.1", ranges=((0, 2),)).body(),
        lab.records.Tokens(
            tape="a", call="a.1", prompt=lab.arrays.ints([1]), completion=lab.arrays.ints([2]), tokenizer="t"
        ).body(),
    ]
    whole = rehash(b"".join(b'{"b":%b,"h":"\n' % body for body in bodies))
    first = parse_line(whole.split(b"\n")[0]).h
    sealed = rehash(b"".join(b'{"b":%b,"h":"\n' % body for body in [*bodies, b'{"t":"commit","opened":"%b"}' % first]))
    return [whole, sealed, *(path.read_bytes() for path in sorted(CORPUS.glob("*.bin")))]


def run(executions: int, seed: int = 0) -> dict[str, Any]:
    """Execute; gives how they ended, and the most memory that was held."""
    rng, inputs = random.Random(seed), seeds()
    ended: dict[str, int] = {}
    full = reader._MENDABLE
    started = time.perf_counter()
    for k in range(executions):
        data = mutate(rng, inputs)
        # Trying every bit of a damaged line is slow by design; most executions try only those of its first bytes.
        reader._MENDABLE = full if k % 50 == 0 else 160
        try:
            how = execute(data, index=k % 10 == 0)
        except Exception:
            (CORPUS / f"found-{seed}-{k}.bin").write_bytes(data)
            raise
        finally:
            reader._MENDABLE = full
        ended[how] = ended.get(how, 0) + 1
    return {"executions": executions, "seed": seed, "ended": ended, "seconds": round(time.perf_counter() - started, 1)}


def peak_memory(data: bytes) -> int:
    """Bytes that one execution holds at most."""
    tracemalloc.start()
    try:
        execute(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


if __name__ == "__main__":
    print(run(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
