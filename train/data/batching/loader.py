"""The data pipeline, from the number of a draw to its example, and packers that resume exactly, on any number of processes.

One optimizer step takes `shards` micro-batches over all processes, micro-batch j from shard j. Each shard is split into `parts`
that take turns, step s belonging to part s mod parts, so that as many data workers can work ahead. Part i of shard j is a
packer of its own over the draws

    n = j + shards * (i + parts * k),    k = 0, 1, 2, ...

and its state is plain data: the next draw and the draws that wait in its buffer. On resume the waiting ones are made again;
nothing is replayed. Of a stream, the state also has the marks from which these are found (`train.data.sources.streams`).

A packer fills rows of a fixed length with whole examples. A row starts with the oldest example in the buffer and takes, of the
others, those whose lengths fill the rest best: the exact solution of the subset-sum problem, with sets of reachable sums as the
bits of Python's integers (a microsecond an example). Among equally full choices older examples go first, so no example waits
for long and the order stays close to that of the draws.

The loader gives the micro-batches of one step at a time, which data workers make, and goes on after any step. torchdata's
`StatefulDataLoader` runs the workers; the state of the data is part of each batch, so that it can move to another number of
processes (a loader's snapshot belongs to one process and its workers).
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import multiprocessing
import multiprocessing.util
import os
import signal
import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from omni.errors import UserError
from omni.utils.process import ENDING
from train.data.batching.batch import Batch, assemble
from train.data.batching.examples import TOO_LONG, Example, ExampleMaker, Prepared, TooLong, Unusable
from train.data.config import PackingConfig
from train.data.readers.containers import ShardError
from train.data.sources.mixture import Draw, Mixture, TaskMixture, UsedUp
from train.data.sources.streams import StreamDraw


class Pipeline:
    """`fetch(n)` is a pure function of (seed, n, number of packers): any process may call it, in any order and again.

    Args:
        tasks: one mixture of tasks for each source.
        kept: number of prepared rows to cache, of sources whose rows are drawn again soon.
        broken: a broken row is an `error`, or skipped and counted (`skip`).
    """

    def __init__(
        self, mixture: Mixture, tasks: Sequence[TaskMixture], maker: ExampleMaker, packing: PackingConfig, seed: int = 0,
        kept: int = 2048, broken: str = "error",
    ) -> None:  # fmt: skip
        self.mixture, self.tasks, self.maker, self.packing = mixture, list(tasks), maker, packing
        self.names = [f"data.sources[{i}] ({source.name})" for i, source in enumerate(mixture.sources)]
        self.seed, self.broken = seed, broken
        self._kept, self._keep = OrderedDict[tuple[int, int], Prepared](), kept

    def fetch(self, number: int, packers: int = 1) -> Example | Unusable:
        """Make the example of draw `number`, or the reason why there is none, where such draws are skipped. `packers`: see
        `Mixture.draw`. UserError: a broken row, or one that no packed row or window can hold; it is named."""
        draw = self.mixture.draw(number, packers)
        try:
            return self._make(draw)
        except ShardError:  # of no row: what follows would not be the same
            raise
        except UserError as error:
            if (self.packing.too_long if isinstance(error, TooLong) else self.broken) != "skip":
                raise
            task, reason = (error.task, error.reason) if isinstance(error, Unusable) else ("", "the row cannot be read")
            return Unusable(str(error), reason, task, self.names[draw.source])

    def marks(self, packer: int, packers: int, draws: Iterable[int]) -> dict[str, list[list[int]]]:
        """Where a packer's streams are, by the number of the source, so that these draws and later ones are made at once."""
        if not self.mixture.streams:
            return {}
        lowest: dict[int, int] = {}
        for draw in (self.mixture.draw(number, packers) for number in draws):
            if isinstance(draw.source_draw, StreamDraw):
                lowest[draw.source] = min(draw.source_draw.number, lowest.get(draw.source, draw.source_draw.number))
        streams = {i: stream.packer(packer, packers) for i, stream in self.mixture.streams.items()}
        return {str(i): [list(mark) for mark in stream.marks_from(lowest.get(i))] for i, stream in streams.items()}

    def _make(self, draw: Draw) -> Example:
        origin = self.mixture.sources[draw.source]
        if origin.repeats:
            where = (draw.source, origin.identity(draw.index))
            if where not in self._kept:
                self._kept[where] = Prepared(origin.row(draw.index), where)
                if len(self._kept) > self._keep:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(where)
            prepared = self._kept[where]
        else:
            prepared = Prepared(self.mixture.row(draw))
        row, mixture = prepared.row, self.tasks[draw.source]
        tasks = [row.task or mixture.task(draw.number, turn, self.seed) for turn in range(len(row.turns))]
        example = self.maker.make(draw.number, prepared, tasks, self.names[draw.source])
        if len(example.columns) <= self.packing.length:
            return example
        way = "raise packing.length" + ", or set packing.too_long to skip" * (self.packing.too_long == "error")
        raise TooLong(
            f"{example.where} takes {len(example.columns)} time steps as {'+'.join(tasks)}, a packed row holds "
            f"{self.packing.length}: {way}",
            tasks[0],
        )


_CHOICE = 1.25
"""Least total length of the examples in a buffer, in rows: with less than a row and a quarter there is little choice."""

_GIVE_UP = 10_000
"""Consecutive unusable draws after which a packer raises an error; a twentieth where none could be used before."""

States = dict[str, dict[str, Any]]
"""State of every part of every shard, by "shard.part"; plain data, fit for JSON and `torch.save(..., weights_only)`."""


class PackerShard:
    """The packer of one part of one shard.

    Args:
        shard, shards: which shard of how many.
        state: of a batch that this packer made, to go on after it; None for the start.
    """

    def __init__(
        self, pipeline: Pipeline, shard: int, shards: int, part: int = 0, parts: int = 1, state: Mapping[str, Any] | None = None
    ) -> None:
        self.pipeline = pipeline
        self.share = {"packer_shard": shard, "packer_shards": shards, "packer_part": part, "packer_parts": parts}
        self.stride = shards * parts
        self.next = shard + shards * part
        self.skipped = self.broken = 0
        self.fitting = state is not None  # an example could be used
        self.counts = Counts()
        self.buffer: list[Example] = []
        if state is not None:
            self._restore(state)

    def batch(self) -> Batch:
        """Make the next micro-batch. Where the sources end, the last one may have empty rows; UsedUp where nothing is left."""
        packing = self.pipeline.packing
        rows = [self._row() for _ in range(packing.rows)]
        if not any(rows):
            self.pipeline.mixture.check(self.next, self.stride)
        for example in (example for row in rows for example in row):
            self.counts.train(example.source, Trained(1, example.milliseconds, len(example.columns)))
        maker = self.pipeline.maker
        encoded = maker.frames is not None
        return assemble(rows, packing.length, maker.model.layout, maker.input_size, self.state(), encoded)

    def state(self) -> dict[str, Any]:
        """State as plain data, from which `PackerShard(state=...)` goes on."""
        waiting = [example.draw for example in self.buffer]
        counters = {"next": self.next, "buffer": waiting, "skipped": self.skipped, "broken": self.broken}
        marks = self.pipeline.marks(self.next % self.stride, self.stride, waiting)
        return {**self.share, **counters, "counts": self.counts.plain(), **({"streams": marks} if marks else {})}

    def _row(self) -> list[Example]:
        packing = self.pipeline.packing
        filled = sum(len(example.columns) for example in self.buffer)
        unused = 0
        while len(self.buffer) < packing.buffer or filled < _CHOICE * packing.length:
            try:
                example = self.pipeline.fetch(self.next, self.stride)
            except UsedUp:
                break
            self.next += self.stride
            if isinstance(example, Unusable):
                self.skipped += example.reason == TOO_LONG
                self.broken += example.reason != TOO_LONG
                self.counts.leave_out(example)
                unused += 1
                if unused == (_GIVE_UP if self.fitting else _GIVE_UP // 20):
                    reasons = "; ".join([*self.counts.lines().values()][:2])
                    raise UserError(
                        f"{unused} examples one after another cannot be used; {reasons}. Complete the rows, or "
                        f"raise packing.length {packing.length} where it is too small"
                    )
            else:
                self.fitting = True
                self.counts.add(example.source, example.tasks)
                self.buffer.append(example)
                filled += len(example.columns)
        if not self.buffer:
            return []
        chosen = choose([len(example.columns) for example in self.buffer], packing.length)
        row = [self.buffer[i] for i in chosen]
        self.buffer = [example for i, example in enumerate(self.buffer) if i not in set(chosen)]
        return row

    def _restore(self, state: Mapping[str, Any]) -> None:
        if (share := {name: state.get(name) for name in self.share}) != self.share:
            raise UserError(f"the data's state is of {share}, this run needs {self.share}: resume with the same micro_batches")
        self.next, self.skipped, self.broken = (int(state.get(name, 0)) for name in ("next", "skipped", "broken"))
        self.counts = Counts.joined([state.get("counts", {})])
        for i, stream in self.pipeline.mixture.streams.items():
            stream.packer(self.next % self.stride, self.stride).restore(state.get("streams", {}).get(str(i), ()))
        for draw in state["buffer"]:
            example = self.pipeline.fetch(int(draw), self.stride)
            if isinstance(example, Unusable):
                raise UserError(
                    f"draw {draw} of the state cannot be used now ({example}): resume with the same data and packing"
                )
            self.buffer.append(example)


def update_states(states: States, batches: Iterable[Batch]) -> None:
    """Update `states` with the packers' states after these batches; to be called with every consumed step."""
    for batch in batches:
        states["{packer_shard}.{packer_part}".format(**batch.state)] = batch.state


def merge(parts: Sequence[States]) -> States:
    """Merge the states of all processes into one, to be stored in a checkpoint."""
    return {key: state for part in parts for key, state in part.items()}


def choose(lengths: Sequence[int], room: int) -> list[int]:
    """Choose the examples that fill a row of `room` positions best, as ascending indices; the first, oldest is always chosen.
    `lengths` are positive and each at most `room`."""
    mask = (1 << (room + 1)) - 1
    # reachable[i]: bit s is set where examples i, i + 1, ... have a subset of summed length s.
    reachable = [1] * (len(lengths) + 1)
    for i in range(len(lengths) - 1, 0, -1):
        reachable[i] = (reachable[i + 1] | reachable[i + 1] << lengths[i]) & mask
    rest = (reachable[1] & ((1 << (room - lengths[0] + 1)) - 1)).bit_length() - 1
    chosen = [0]
    for i in range(1, len(lengths)):
        if lengths[i] <= rest and reachable[i + 1] >> (rest - lengths[i]) & 1:
            chosen.append(i)
            rest -= lengths[i]
    return chosen


# --- counts ----------------------------------------------------------------------------------------------------

FIRST = 3
"""Number of messages kept for each source, task and reason."""

ENOUGH = 100
"""Fewest draws of a source for a task at which the broken share is checked."""

SPREAD = 4.0
"""Standard deviations by which the number of broken rows may exceed the limit, as chance allows."""

COLUMNS = ("source", "task", "reason", "rows", "of", "share", "first")
"""Columns of the file `unused.csv`: `of` are all draws of the source for the task, `share` is rows / of."""


class Trained(NamedTuple):
    """Counts of what has been trained of a source: rows, milliseconds of sound (see `Example`) and tokens (time steps)."""

    rows: int
    milliseconds: int
    tokens: int


@dataclass
class Counts:
    """Counts of draws by source, and by source and task; of unused ones by reason, with the first messages; and of what is
    trained, which does not include examples that wait to be packed."""

    sources: Counter[str] = field(default_factory=Counter)
    drawn: Counter[tuple[str, str]] = field(default_factory=Counter)
    unused: dict[tuple[str, str, str], tuple[int, tuple[str, ...]]] = field(default_factory=dict)
    trained: dict[str, Trained] = field(default_factory=dict)

    def add(self, source: str, tasks: Iterable[str]) -> None:
        """Count a draw of a source for these tasks (of its turns)."""
        self.sources[source] += 1
        self.drawn.update((source, task) for task in dict.fromkeys(tasks))  # in an order that is the same in every process

    def train(self, source: str, more: Trained) -> None:
        """Count what a batch has of a source."""
        self.trained[source] = Trained(*map(sum, zip(self.trained.get(source, (0, 0, 0)), more, strict=True)))

    def leave_out(self, draw: Unusable) -> None:
        """Count an unused draw, and keep its message where it is among the first."""
        self.add(draw.source, [draw.task])
        key = draw.source, draw.task, draw.reason
        count, first = self.unused.get(key, (0, ()))
        self.unused[key] = count + 1, first if len(first) == FIRST else (*first, str(draw))

    def plain(self) -> dict[str, Any]:
        """Convert to plain data, fit for JSON."""
        return {
            "sources": [[source, count] for source, count in self.sources.items()],
            "drawn": [[*key, count] for key, count in self.drawn.items()],
            "unused": [[*key, count, list(first)] for key, (count, first) in self.unused.items()],
            "trained": [[source, *amounts] for source, amounts in self.trained.items()],
        }

    @classmethod
    def joined(cls, several: Iterable[Mapping[str, Any]]) -> Counts:
        """Sum plain counts; of the messages, the first in their order."""
        out = cls()
        for counts in several:
            out.sources.update(dict(counts.get("sources", ())))
            out.drawn.update({(source, task): count for source, task, count in counts.get("drawn", ())})
            for source, task, reason, count, first in counts.get("unused", ()):
                before, known = out.unused.get((source, task, reason), (0, ()))
                out.unused[source, task, reason] = before + count, (*known, *first)[:FIRST]
            for source, *amounts in counts.get("trained", ()):
                out.train(source, Trained(*amounts))
        return out

    def total(self, source: str, task: str) -> int:
        """Number of draws of a source for a task; for the task "", of rows that could not be read, all draws of the source."""
        return self.drawn[source, task] if task else self.sources[source]

    def check(self, limit: float) -> None:
        """Stop where the broken share of a source's draws for a task exceeds `limit` by more than chance (UserError)."""
        for source, task in dict.fromkeys((s, t) for s, t, reason in self.unused if reason != TOO_LONG):
            of = self.total(source, task)
            bad = {r: n for (s, t, r), (n, _) in self.unused.items() if (s, t) == (source, task) and r != TOO_LONG}
            if of >= ENOUGH and sum(bad.values()) > limit * of + SPREAD * math.sqrt(limit * (1 - limit) * of):
                reasons = "; ".join(line for (s, t, r), line in self.lines().items() if (s, t) == (source, task) and r in bad)
                raise UserError(
                    f"{reasons}. More than data.broken_limit {limit:g} of them are broken: complete or drop these rows, take "
                    "the task out of the source's tasks, or raise the limit"
                )

    def lines(self) -> dict[tuple[str, str, str], str]:
        """Format a line for each source, task and reason, the most frequent first."""
        out = {}
        for (source, task, reason), (count, first) in sorted(self.unused.items(), key=lambda item: -item[1][0]):
            of = self.total(source, task)
            text = f"{count} of {of} rows ({count / of:.1%}) left out: {reason} (the first: {first[0]})"
            out[source, task, reason] = f"{source}{f' as {task}' if task else ''}: {text}"
        return out

    def table(self) -> str:
        """Format the file `unused.csv`: comma-separated values under `COLUMNS`."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(COLUMNS)
        for (source, task, reason), (count, first) in sorted(self.unused.items()):
            of = self.total(source, task)
            writer.writerow([source, task, reason, count, of, f"{count / of:.6g}", " | ".join(first)])
        return out.getvalue()


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
        for step in itertools.count(self.start + first, stride):
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
            f"data.micro_batches is {micro_batches}, which {world} processes cannot share; make it a multiple of {world}"
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
