"""The loader: one step's micro-batches at a time, made by data workers, resumable after any step.

torchdata's `StatefulDataLoader` runs the workers. The state of the data is not the loader's but part of each batch, so that it
can move to another number of processes (a loader's snapshot belongs to one process and its workers).
"""

from __future__ import annotations

import math
import multiprocessing
import multiprocessing.util
import os
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from omni.errors import UserError
from omni.utils.process import ENDING
from train.data.batching.batch import Batch
from train.data.batching.packer import PackerShard, Pipeline, States, update_states
from train.data.sources.mixture import UsedUp


class _Steps(IterableDataset):
    """The steps of this process. Worker w of W makes steps start + w, start + w + W, ... Its last item may be a UserError,
    which the loader raises without the worker's traceback around it."""

    def __init__(
        self, pipeline: Pipeline, micro_batches: int, shards: Sequence[int], parts: int, start: int, states: Mapping[str, Any]
    ) -> None:
        self.pipeline, self.micro_batches, self.shards = pipeline, micro_batches, shards
        self.parts, self.start, self.states = parts, start, states
        self.end: Connection | None = None  # becomes readable (and is never read) when the program ends

    def __iter__(self) -> Iterator[list[Batch] | UserError]:
        info = get_worker_info()
        first, stride = (info.id, info.num_workers) if info else (0, 1)
        packers: dict[str, PackerShard] = {}
        step = self.start + first
        while True:
            part = step % self.parts
            batches = []
            try:
                for shard in self.shards:
                    key = f"{shard}.{part}"
                    if key not in packers:
                        position = (shard, self.micro_batches, part, self.parts)
                        packers[key] = PackerShard(self.pipeline, *position, self.states.get(key))
                    batches.append(packers[key].batch())
            except UserError as error:
                yield (UsedUp if isinstance(error, UsedUp) else UserError)(str(error))
                return
            yield batches
            step += stride


class StepLoader:
    """Iterates endlessly over steps: each item is the list of this process's micro-batches.

    A run keeps the number of parts that it started with (its number of workers), whatever number of workers it has now.
    UserError: while iterating: an error of a row, as one line; UsedUp where the sources have ended.

    Args:
        micro_batches: micro-batches of a step over all processes.
        shards: which of them this process makes: `process_shards(...)`.
        workers: data worker processes; 0 makes batches in this process.
        states: of the checkpoint to go on from, of all processes together (see `merge`); None for the start.
        pin: put batches into page-locked memory, for a run on a GPU.

    Attributes:
        states: of this process's packers after the last step that was returned; `merge` those of all processes.
        step: number of the next step.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        micro_batches: int,
        shards: Sequence[int] | None = None,
        workers: int = 0,
        start_step: int = 0,
        states: Mapping[str, Any] | None = None,
        *,
        prefetch: int = 2,
        pin: bool = False,
    ) -> None:
        mine = list(range(micro_batches) if shards is None else shards)
        stored = dict(states or {})
        self.parts = next((int(state["packer_parts"]) for state in stored.values()), max(1, workers))
        self.step = start_step
        self.states: States = {key: state for key, state in stored.items() if state["packer_shard"] in mine}
        self.workers = math.gcd(workers, self.parts) if workers else 0
        steps = _Steps(pipeline, micro_batches, mine, self.parts, start_step, dict(self.states))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # importing it calls a deprecated setting of torch
            from torchdata.stateful_dataloader import StatefulDataLoader

            self._loader: Any = StatefulDataLoader(
                steps,
                batch_size=None,
                num_workers=self.workers,
                prefetch_factor=prefetch if self.workers else None,
                persistent_workers=self.workers > 0,
                pin_memory=pin,
                worker_init_fn=_init_worker,
                snapshot_every_n_steps=1 << 30,
            )
        self._iterator: Iterator[list[Batch] | UserError] | None = None
        if self.workers:
            # Workers ignore signals: a pipe tells them of the program's end, before it waits for them, hence the priority.
            steps.end, tell = multiprocessing.Pipe(duplex=False)
            multiprocessing.util.Finalize(self, _end_workers, (steps.end, tell), exitpriority=100)

    def __iter__(self) -> StepLoader:
        return self

    def __next__(self) -> list[Batch]:
        if self._loader is None:
            raise StopIteration
        if self._iterator is None:
            self._iterator = iter(self._loader)
        item = next(self._iterator)
        if isinstance(item, UserError):
            self.close()
            raise item
        self.step += 1
        update_states(self.states, item)
        return item

    def close(self) -> None:
        """End the workers; the loader cannot be used afterwards."""
        self._iterator = self._loader = None


def process_shards(micro_batches: int, rank: int, world: int) -> range:
    """The shards of process `rank` of `world`; UserError where they do not divide evenly."""
    if micro_batches % world:
        raise UserError(
            f"{micro_batches} micro-batches a step cannot be shared by {world} processes; make it a multiple of {world}"
        )
    each = micro_batches // world
    return range(rank * each, (rank + 1) * each)


def _end_workers(end: Connection, tell: Connection) -> None:
    tell.send_bytes(b"end")
    tell.close()
    end.close()


def _init_worker(_: int) -> None:
    """Initialise a worker: one thread, signals left to the run (which saves first), and an end when the run ends in any way."""
    torch.set_num_threads(1)
    for name in (signal.SIGINT, *ENDING):
        signal.signal(name, signal.SIG_IGN)
    info = get_worker_info()
    assert info is not None and isinstance(info.dataset, _Steps) and info.dataset.end is not None
    done = threading.Event()
    # Not a daemon, which would be torn down with the interpreter: at its end the worker sets `done`, then waits for the thread.
    threading.Thread(target=_exit_with_parent, args=(os.getppid(), info.dataset.end, done)).start()
    multiprocessing.util.Finalize(None, done.set, exitpriority=100)


def _exit_with_parent(parent: int, end: Connection, done: threading.Event) -> None:
    """End this process when its parent has ended, or announces its end on the pipe."""
    while not done.is_set():
        if end.poll(0.2) or os.getppid() != parent:
            os._exit(0)
