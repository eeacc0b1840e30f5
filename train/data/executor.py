"""Does work on many items in processes of this machine or of a Ray cluster, and gives the results in the order of the items.

`imap(start, items, processes)` is all of it: each process calls `start()` once and its result with one item after another. A
result depends on its item alone, so it is the same from one process, from many, and from a cluster. A process that dies ends
the work on this machine; Ray starts it again, and gives it its items again.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging.handlers import BufferingHandler
from typing import Any, TypeVar

from tqdm import tqdm

from omni.errors import UserError
from omni.plugins import load_plugins, loaded
from omni.utils.hardware import cores

LOG = logging.getLogger("omni")

RETRIES = 10
"""Number of times that Ray gives an item to a process which dies, after the first."""
_AHEAD = 2  # items given to each process of a cluster: the one in progress and the next
_WINDOW = 4  # items per process that are begun and whose results are not taken yet

THREADS = 16
"""Items of a store that are worked on side by side."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Processes:
    """Which processes work.

    Attributes:
        workers: their number; 0 for this process alone, None for one on every core (and `threads`) or GPU.
        ray: address of the Ray cluster they are of, see `PrepareConfig`; empty for this machine.
    """

    workers: int | None = None
    threads: int = 1
    device: str = "cpu"
    ray: str = ""

    @property
    def count(self) -> int:
        """Number of processes on this machine; 0 for this process alone."""
        if self.workers is not None:
            return self.workers
        most = max(1, cores() // self.threads)
        return most if self.device == "cpu" else min(most, 4)  # each has a copy of the weights on the device


HERE = Processes(0)
"""This process alone."""


def imap(
    start: Callable[[], Callable[[range], Result]], items: Sequence[range], processes: Processes
) -> Generator[Result, None, None]:
    """Apply work to items, and yield the results in their order; a few are begun before they are asked for.

    UserError: what the work raises; a process that was killed; a cluster that does not answer, or has no room.

    Args:
        start: makes the work, once in each process, with the plug-ins of this one; it can be pickled.
        items: what an item is of, such as the numbers of rows, names it in errors.
    """
    if not items:
        return
    if not processes.ray and (not processes.count or len(items) == 1):
        yield from _here(start, items, processes.threads)
        return
    with (_cluster if processes.ray else _pool)(start, len(items), processes) as (submit, count):
        for done in in_order(submit, items, _WINDOW * count):
            for line in done.warnings:
                LOG.warning("%s", line)
            if done.mistake is not None:
                raise UserError(done.mistake)
            yield done.result


def in_order(submit: Callable[[Item], Future[Result]], items: Iterable[Item], most: int) -> Iterator[Result]:
    """Yield the results of what `submit` begins, in the order of the items: `most` at a time are begun and not yet taken."""
    begun: deque[Future[Result]] = deque()
    for item in items:
        begun.append(submit(item))
        while begun and (len(begun) >= most or begun[0].done()):
            yield begun.popleft().result()
    while begun:
        yield begun.popleft().result()


def in_threads(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Iterate as `map`, where the work waits for a store: a few items are begun before they are asked for."""
    pool = ThreadPoolExecutor(THREADS)
    try:
        yield from in_order(lambda item: pool.submit(work, item), items, THREADS)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _here(start: Callable[[], Callable[[range], Result]], items: Sequence[range], threads: int) -> Iterator[Result]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield from map(start(), items)
    finally:
        torch.set_num_threads(before)


@dataclass
class _Done:
    """The result of an item, with what is told to the user: warnings, and a UserError's text in place of the result."""

    result: Any = None
    mistake: str | None = None
    warnings: list[str] = field(default_factory=list)


class ItemWorker:
    """Works on items in a process of its own."""

    def __init__(self, start: bytes, plugins: Sequence[str], threads: int) -> None:
        self._start, self._plugins, self._threads = start, plugins, threads
        self._work: Callable[[range], Any] | None = None

    def do(self, item: range) -> _Done:
        """Work on an item; the first call makes the work."""
        done, handler = _Done(), BufferingHandler(1 << 20)
        handler.setLevel(logging.WARNING)
        LOG.addHandler(handler)
        try:
            if self._work is None:
                import torch

                torch.set_num_threads(self._threads)
                load_plugins(self._plugins)
                self._work = pickle.loads(self._start)()
            done.result = self._work(item)
        except UserError as error:
            done.mistake = str(error)
        finally:
            LOG.removeHandler(handler)
        done.warnings = [record.getMessage() for record in handler.buffer]
        return done


Submit = Callable[[range], "Future[_Done]"]


@contextmanager
def _pool(start: Callable[[], Any], items: int, processes: Processes) -> Iterator[tuple[Submit, int]]:
    """Processes of this machine: what gives them an item, and their number."""
    others, count = set(multiprocessing.active_children()), min(processes.count, items)
    context = multiprocessing.get_context("spawn")  # a fork would copy threads and locks of torch
    arguments = pickle.dumps(start), loaded(), processes.threads
    pool = ProcessPoolExecutor(count, context, _enter, arguments)
    try:
        yield lambda item: pool.submit(_do, item), count
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process was killed, perhaps for want of memory: run the same command again, with fewer --workers"
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        pool.shutdown()


_worker: ItemWorker


def _enter(start: bytes, plugins: Sequence[str], threads: int) -> None:
    """Begin a process of the pool, which ends with this one."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started it ends it
    tqdm.set_lock(threading.RLock())  # else a library's bar makes one for several processes, which outlives this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = ItemWorker(start, plugins, threads)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _do(item: range) -> _Done:
    return _worker.do(item)


@contextmanager
def _cluster(start: Callable[[], Any], items: int, processes: Processes) -> Iterator[tuple[Submit, int]]:
    """Actors of a cluster, as `_pool`: `workers`, or one for each core (and `threads`) or GPU, no more than there are items."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise UserError('--ray needs Ray, which is not installed: pip install "omni-speech[ray]"') from error
    own, actors = not ray.is_initialized(), []
    if own:
        _connect(ray, processes.ray)
    try:
        needs = {"CPU": processes.threads, "GPU": 0 if processes.device == "cpu" else 1}
        count = min(items, processes.workers or _room(ray, needs, processes.ray))
        options = {"max_restarts": -1, "max_task_retries": RETRIES}
        actor_class = ray.remote(num_cpus=needs["CPU"], num_gpus=needs["GPU"], **options)(ItemWorker)
        work = pickle.dumps(start)
        actors = [actor_class.remote(work, loaded(), processes.threads) for _ in range(count)]
        idle: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for actor in actors * _AHEAD:
            idle.put(actor)
        threads = ThreadPoolExecutor(len(actors) * _AHEAD)
        try:
            yield lambda item: threads.submit(_on_actor, ray, idle, item), count
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for actor in actors:
                ray.kill(actor)
            threads.shutdown()
    finally:
        if own:
            ray.shutdown()


def _on_actor(ray: Any, idle: queue.SimpleQueue[Any], item: range) -> _Done:
    actor = idle.get()
    try:
        done: _Done = ray.get(actor.do.remote(item))
    except ray.exceptions.RayActorError as error:
        raise UserError(
            f"items {item.start} to {item.stop - 1} end each process that works on them ({RETRIES + 1} tries), perhaps for "
            "want of memory: run the same command again, with fewer --workers or on larger machines"
        ) from error
    finally:
        idle.put(actor)
    return done


def _room(ray: Any, needs: dict[str, int], address: str) -> int:
    """Number of actors that the cluster has room for; UserError where it has none."""
    has = ray.cluster_resources()
    for name, number in needs.items():
        if has.get(name, 0) < number:
            raise UserError(
                f"ray {address!r}: the cluster has {has.get(name, 0):g} {name} and a worker needs {number}: give "
                f"another --{'threads' if name == 'CPU' else 'device'}, or another cluster"
            )
    return int(min(has[name] // number for name, number in needs.items() if number))


def _connect(ray: Any, address: str) -> None:
    local = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address, logging_level=logging.WARNING, log_to_driver=False, **local)
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(
            f"ray {address!r} is no cluster that answers ({why}): start one by `ray start --head`, or give --ray local"
        ) from error
