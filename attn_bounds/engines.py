"""Where the chunks of a run are computed: this process, a pool of them, or a Dask cluster. Results come in order."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import torch

from .errors import ArgumentError, EngineError, MissingDependencyError

ENGINES = ("local", "dask")
AHEAD = 4  # chunks in flight for each worker
Item = TypeVar("Item")
Answer = TypeVar("Answer")


def run_on(
    engine: str, function: Callable[[Item], Answer], items: Sequence[Item], jobs: int = 1, address: str | None = None
) -> Iterator[Answer]:
    """Yield function(item) for every item, in order.

    Args: engine `local` (`jobs` processes; 1: this one) or `dask` (the scheduler at `address`, which gives the chunks
        of a lost worker to another). function and items must pickle.
    Raises: ArgumentError, MissingDependencyError, EngineError where workers died.
    """
    if engine not in ENGINES:
        raise ArgumentError(f"engine: expected one of {', '.join(ENGINES)}, got {engine!r}")
    if jobs < 1:
        raise ArgumentError(f"jobs: expected at least 1, got {jobs}")
    if engine == "dask":
        return _dask(function, items, address)
    if address is not None:
        raise ArgumentError(f"address: expected none with engine 'local', got {address!r}")
    return _processes(function, items, jobs) if jobs > 1 else map(function, items)


def _one_thread() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)  # processes share the cores; threads inside them would fight


def _processes(function: Callable[[Item], Answer], items: Sequence[Item], jobs: int) -> Iterator[Answer]:
    context = multiprocessing.get_context("spawn")  # a fork of a process that has used torch's threads can hang
    pool = ProcessPoolExecutor(jobs, context, initializer=_one_thread)
    try:
        yield from _in_order(lambda item: pool.submit(function, item), items, AHEAD * jobs)
    except BrokenProcessPool:
        raise EngineError("jobs: a worker process died (out of memory?); continue with --resume") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _dask(function: Callable[[Item], Answer], items: Sequence[Item], address: str | None) -> Iterator[Answer]:
    try:
        from distributed import Client, KilledWorker
    except ImportError:
        raise MissingDependencyError("engine: 'dask' needs a package: pip install 'distributed'") from None
    if address is None:
        raise ArgumentError("address: expected the Dask scheduler's, as in --address tcp://host:8786, got none")
    try:
        client = Client(address, timeout="20s")
    except (OSError, ValueError) as error:
        raise EngineError(f"address: no Dask scheduler answers at {address!r} ({error})") from None
    try:
        ahead = AHEAD * max(len(client.nthreads()), 1)
        yield from _in_order(lambda item: client.submit(function, item, pure=False, retries=2), items, ahead)
    except KilledWorker as error:
        raise EngineError(f"engine: workers died on one chunk again and again ({error}); use --resume") from None
    finally:
        client.close()


def _in_order(submit: Callable[[Item], Any], items: Sequence[Item], ahead: int) -> Iterator[Any]:
    """Results in order, with a bounded number of futures waiting."""
    waiting: list[Future] = []
    for item in items:
        waiting.append(submit(item))
        if len(waiting) >= ahead:
            yield waiting.pop(0).result()
    for future in waiting:
        yield future.result()
