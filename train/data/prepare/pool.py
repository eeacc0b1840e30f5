"""Makes blocks in several processes and returns them in order, with no more than a few in memory.

Each process gets its work over a pipe of its own. A closed pipe tells a process, or its master, that the other has died, so no
process is left running when either is killed.
"""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import signal
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, cast

from tqdm import tqdm

from omni.errors import UserError
from omni.plugins import load_plugins, loaded
from train.data.prepare.config import PrepareConfig
from train.data.prepare.worker import BLOCK, BlockMaker, PreparedBlock, Tick
from train.data.readers import OpenedSource
from train.data.rows.row import features

if TYPE_CHECKING:
    from omni.codec.base import AudioCodec

LOG = logging.getLogger("omni")

_AHEAD = 2  # blocks assigned to each process at a time: the one in progress and the next
_WINDOW = 4  # blocks per process that are assigned and not returned yet


def make_blocks(
    source: OpenedSource, config: PrepareConfig, starts: range, total: int, tick: Tick, codec: AudioCodec | None = None
) -> Generator[PreparedBlock, None, None]:
    """Make the blocks that start at `starts` and end before `total`, in this order, in `config.processes`.

    `codec` is the configuration's, for this process; others load one of their own.

    Raises:
        UserError: the codec, a voice or the source cannot be opened, or a process was killed.
    """
    if not starts:
        return
    processes = min(config.processes, len(starts))
    if processes == 0:
        yield from _here(source, config, starts, total, tick, codec)
        return
    yield from pooled(_Pool(source, config, processes), starts, total, tick)


def pooled(pool: BlockPool, starts: range, total: int, tick: Tick) -> Iterator[PreparedBlock]:
    """Make blocks as `make_blocks`, in a pool, which is closed at the end."""
    try:
        yield from pool.run(starts, total, tick)
    finally:
        pool.close()


def _here(
    source: OpenedSource, config: PrepareConfig, starts: range, total: int, tick: Tick, codec: AudioCodec | None
) -> Iterator[PreparedBlock]:
    import torch

    threads = torch.get_num_threads()
    try:
        maker = BlockMaker(source, config, features().arrow_schema, codec)
        for start in starts:
            yield maker.make(start, min(start + BLOCK, total), tick)
    finally:
        torch.set_num_threads(threads)


class BlockPool(ABC):
    """Worker processes, each with blocks in hand, in `workers`."""

    workers: dict[Any, Any]

    def run(self, starts: range, total: int, tick: Tick) -> Iterator[PreparedBlock]:
        """Assign and return blocks in order."""
        told = given = 0
        busy = dict.fromkeys(self.workers, 0)
        ready: dict[int, PreparedBlock] = {}
        while given < len(starts):
            while told < len(starts) and told - given < _WINDOW * len(busy) and min(busy.values()) < _AHEAD:
                worker = min(busy, key=lambda one: busy[one])
                self.send(worker, starts[told], min(starts[told] + BLOCK, total))
                busy[worker] += 1
                told += 1
            for worker, message in self.receive():
                if isinstance(message, PreparedBlock):
                    ready[starts.index(message.start)] = message
                    busy[worker] -= 1
                else:
                    tick(*message)
            while given in ready:
                yield ready.pop(given)
                given += 1

    @abstractmethod
    def send(self, worker: Any, start: int, stop: int) -> None:
        """Assign the block of items `start` to `stop`; never waits for a busy worker."""

    @abstractmethod
    def receive(self) -> Iterator[tuple[Any, PreparedBlock | tuple[int, float]]]:
        """Wait for blocks, and for items and seconds that are done in others, of any worker; UserError where one fails."""

    @abstractmethod
    def close(self) -> None:
        """End all workers."""


class _Pool(BlockPool):
    """Processes of this machine."""

    def __init__(self, source: OpenedSource, config: PrepareConfig, processes: int) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy threads and locks of torch
        work = pickle.dumps((source, config, features().arrow_schema))
        plugins = loaded()
        self.workers: dict[Connection, Any] = {}
        for _ in range(processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, work, plugins), daemon=True)
            process.start()
            theirs.close()
            self.workers[ours] = process

    def send(self, worker: Connection, start: int, stop: int) -> None:
        try:
            worker.send((start, stop))
        except OSError:
            self._raise_dead(worker)

    def receive(self) -> Iterator[tuple[Connection, PreparedBlock | tuple[int, float]]]:
        for pipe in cast("list[Connection]", wait(list(self.workers))):
            yield pipe, self._receive(pipe)

    def _receive(self, pipe: Connection) -> Any:
        try:
            kind, content = pipe.recv()
        except (EOFError, OSError):
            self._raise_dead(pipe)
        if kind == "mistake":
            raise UserError(content)
        if kind == "failure":
            raise RuntimeError(f"a process that prepares failed:\n{content}")
        if kind == "warning":
            LOG.warning("%s", content)
            return 0, 0.0
        return content

    def _raise_dead(self, pipe: Connection) -> None:
        process = self.workers[pipe]
        process.join(5)
        code = process.exitcode
        how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with {code}"
        raise UserError(
            f"a process that prepares {how}, perhaps for want of memory: run the same command again to go on, "
            "with fewer --workers"
        )

    def close(self) -> None:
        for pipe, process in self.workers.items():
            pipe.close()
            process.terminate()
        for process in self.workers.values():
            process.join()


class _Telling(logging.Handler):
    """Gives warnings of the library to a function, as lines."""

    def __init__(self, tell: Callable[[str, Any], None]) -> None:
        super().__init__(logging.WARNING)
        self.tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # whoever listens has ended
            self.tell("warning", record.getMessage())


def _work(pipe: Connection, work: bytes, plugins: Sequence[str]) -> None:
    """Run a worker process: make the assigned blocks until the master closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the master ends it
    tqdm.set_lock(threading.RLock())  # else a library's bar makes one for several processes, which outlives this one
    alone = threading.Lock()

    def tell(kind: str, content: Any) -> None:
        with alone:
            pipe.send((kind, content))

    logging.getLogger("omni").addHandler(_Telling(tell))
    try:
        load_plugins(plugins)
        maker = BlockMaker(*pickle.loads(work))
        while True:
            start, stop = pipe.recv()
            block = maker.make(start, stop, lambda items, seconds: tell("tick", (items, seconds)))
            tell("block", block)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except UserError as error:
        tell("mistake", str(error))
    except BaseException:
        tell("failure", traceback.format_exc())
