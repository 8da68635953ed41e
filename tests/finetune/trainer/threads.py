"""Ranks that are threads of one process: the trainer's own protocol of several processes, at the price of a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tapereel.finetune.trainer import Ranks

T = TypeVar("T")


class Threads(Ranks):
    """One of `size` ranks. They meet at every sum, in the same order, or the barrier breaks."""

    def __init__(self, rank: int, table: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(table)
        self._table, self._barrier = table, barrier

    def all_gather(self, value: T) -> list[T]:
        self._table[self.rank] = value
        self._barrier.wait()
        found = list(self._table)
        self._barrier.wait()
        return found

    def add_up(self, x: Tensor) -> Tensor:
        return torch.stack(self.all_gather(x)).sum(0)

    def any(self, flag: bool) -> bool:
        return any(self.all_gather(flag))

    def add_up_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        for p in parameters:
            p.grad = self.add_up(torch.zeros_like(p) if p.grad is None else p.grad)


def together(size: int, work: Callable[[Threads], T]) -> list[T]:
    """`work` of each rank, all at once; the first error of any."""
    table, barrier = [None] * size, threading.Barrier(size, timeout=60)
    done: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            done[rank] = work(Threads(rank, table, barrier))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return [done[rank] for rank in range(size)]
