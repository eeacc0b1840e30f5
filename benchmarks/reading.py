"""Measures the rate at which prepared rows become packed batches, and the time to the first batch, of little and much data."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import torch

from benchmarks.prepare import one_thread, sound
from benchmarks.timing import TimingRow
from omni.audio.io import SAMPLE_RATE
from omni.codec.registry import load_codec
from omni.config import preset
from omni.text import Tokenizer
from train.data.batching.examples import ExampleMaker
from train.data.batching.loader import StepLoader
from train.data.batching.pipeline import Pipeline
from train.data.config import WINDOW, PackingConfig
from train.data.rows.indexing import write_index
from train.data.rows.parquet import write_rows
from train.data.rows.parts import Needed
from train.data.rows.row import Codes, RowTurn, Sound
from train.data.rows.row import Row as DataRow
from train.data.sources.base import StoredSource
from train.data.sources.mixture import Mixture, TaskMixture

KINDS = 64
"""Number of rows that differ; all others repeat them."""
TASKS = {"A1T1": 0.5, "A1A2": 0.5}
NEEDED = Needed(frozenset(TASKS))


def reading(
    counts: Sequence[int] = (1000, 400_000), shard: int = 4000, steps: int = 4, repeat: int = 3,
    packing: PackingConfig | None = None,
) -> list[TimingRow]:  # fmt: skip
    """Measures on one core, with batches made in this process, for the `nano` preset; files are just written, hence cached.

    The first batch is timed from where a run opens its data; resumed, with the state of a run that has made `steps` batches.
    Of the last number of rows, both orders follow, with the files' index.

    Args:
        counts: numbers of rows.
        shard: rows of a file, in the groups that `data prepare` makes.
        steps: batches whose rate is taken, after a first one.
    """
    packing = packing or PackingConfig()
    out, firsts = [], []
    with tempfile.TemporaryDirectory() as folder, one_thread():
        write_shards(Path(folder) / "warm", KINDS, KINDS)
        next(_open(Path(folder) / "warm", packing))  # imports
        for count in counts:
            data = Path(folder) / str(count)
            files = write_shards(data, count, shard)
            fresh, rates, resumed = [], [], []
            for _ in range(repeat):
                start = time.perf_counter()
                loader = _open(data, packing)
                next(loader)
                begun = time.perf_counter()
                examples = sum(batch.examples for _ in range(steps) for batch in next(loader))
                rates.append(60 * examples / (time.perf_counter() - begun))
                fresh.append(begun - start)
                states = json.loads(json.dumps(loader.states))
                start = time.perf_counter()
                next(_open(data, packing, loader.step, states))
                resumed.append(time.perf_counter() - start)
            firsts.append((statistics.median(fresh), statistics.median(resumed)))
            name = f"{count:,} rows in {files} file{'s' * (files > 1)}"
            out += [
                TimingRow(f"{name}: rows packed a minute", statistics.median(rates)),
                TimingRow(f"{name}: first batch", firsts[-1][0], "s"),
                TimingRow(f"{name}: first batch, resumed", firsts[-1][1], "s"),
            ]
        orders = _orders(Path(folder) / str(counts[-1]), packing, 10 * steps)
    return [*out, TimingRow(f"first batch, {counts[-1]:,} / {counts[0]:,} rows", firsts[-1][0] / firsts[0][0], "x"), *orders]


def _orders(data: Path, packing: PackingConfig, batches: int) -> list[TimingRow]:
    """Measures rates in both orders, and the bytes that are read over those of the columns that examples need."""
    write_index(data)
    file = pq.read_metadata(next(data.glob("*.parquet")))
    needed = set(NEEDED.first.paths(file))
    groups = [file.row_group(number) for number in range(file.num_row_groups)]
    chunks = (group.column(number) for group in groups for number in range(group.num_columns))
    used = sum(chunk.total_compressed_size for chunk in chunks if chunk.path_in_schema in needed) / file.num_rows
    out = []
    for name, window in (("random", None), ("sequential", WINDOW)):
        loader = _open(data, packing, window=window)
        next(loader)
        (state,) = loader.states.values()
        rows, read, start = state["next"], _read_bytes(), time.perf_counter()
        examples = sum(batch.examples for _ in range(batches) for batch in next(loader))
        seconds = time.perf_counter() - start
        (state,) = loader.states.values()
        out.append(TimingRow(f"order {name}, with an index: rows packed a minute", 60 * examples / seconds))
        if read is not None:
            share = (_read_bytes() - read) / used / (state["next"] - rows)
            out.append(TimingRow(f"order {name}, with an index: bytes read / bytes needed", share, "x"))
    return out


def _read_bytes() -> Any:
    """Bytes that this process has read so far; None where the system does not count them."""
    counters = getattr(psutil.Process(), "io_counters", None)
    return getattr(counters(), "read_chars", None) if counters is not None else None


def _open(
    data: Path, packing: PackingConfig, step: int = 0, states: Mapping[str, Any] | None = None, window: int | None = None
) -> StepLoader:
    """Opens a loader over stored rows, as a run does."""
    maker = ExampleMaker(preset("nano"), Tokenizer.bytes(), load_codec("codec2"))
    source = StoredSource(data, needed=NEEDED, window=window)
    windows = {} if source.windows is None else {0: source.windows}
    pipeline = Pipeline(Mixture([source], [1.0], windows=windows), [TaskMixture(TASKS)], maker, packing)
    return StepLoader(pipeline, 1, start_step=step, states=states)


def write_shards(folder: Path, count: int, shard: int) -> int:
    """Writes `count` short rows: half a second asked, a sentence and a second of Codec2 answered. Returns the number of files.

    Equal files are hard links to one file, where the disk has these.
    """
    g = torch.Generator().manual_seed(0)
    rows = [
        DataRow(
            (
                RowTurn(
                    f"what is {i} and {i + 1}?",
                    Sound(sound(0.5, SAMPLE_RATE, i), SAMPLE_RATE),
                    f"it is {i} and {i + 1}.",
                    answer_codes=Codes("codec2", torch.randint(16, (4, 25), generator=g)),
                ),
            ),
            id=str(i),
        )
        for i in range(KINDS)
    ]
    sizes = [shard] * (count // shard) + [count % shard] * (count % shard > 0)
    for number, size in enumerate(sizes):
        file, first = folder / f"rows-{number:05d}.parquet", folder / "rows-00000.parquet"
        if number == 0 or size != shard:
            write_rows(file, (rows[i % KINDS] for i in range(size)))
            continue
        try:
            os.link(first, file)
        except OSError:
            shutil.copy(first, file)
    return len(sizes)
