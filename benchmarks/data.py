"""What data cost: `data prepare` beside its codec and in memory, and prepared rows until they are packed batches.

python -m benchmarks.data [CHECK ...] [--out FILE] [--small]

On one core, in this process but for memory. Codecs have random weights; files are just written, hence cached.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import soundfile
import torch
from torch import Tensor

from benchmarks.apart import run_apart
from benchmarks.report import Figures, in_turns, ratio, run_checks
from omni.audio.io import SAMPLE_RATE
from omni.codec.registry import load_codec
from omni.codec.snac import SNAC_24KHZ
from omni.config import preset
from omni.text import Tokenizer
from omni.utils.profiling import seconds_of
from train.data.batching.examples import ExampleMaker
from train.data.batching.loader import Pipeline, StepLoader
from train.data.config import WINDOW, PackingConfig
from train.data.prepare.prepare import prepare as prepare_rows
from train.data.prepare.rows import PrepareConfig
from train.data.rows.parquet import Needed, StoredRows, leaf_paths, write_rows
from train.data.rows.row import Codes, Row, RowTurn, Sound
from train.data.sources.mixture import Mixture, TaskMixture

IMPORTS = ("torch", "torchaudio", "soundfile", "datasets", "pyarrow.parquet", "train.data.prepare.prepare", "omni.codec.codec2")
"""Modules that the command imports only after its start."""
SMALL_SNAC = {"encoder_dim": 4, "encoder_rates": [2, 4], "decoder_dim": 32, "decoder_rates": [4, 2]}
KINDS = 64
"""Number of rows that differ; all others repeat them."""
TASKS = {"A1T1": 0.5, "A1A2": 0.5}
NEEDED = Needed(frozenset(TASKS))


@contextmanager
def one_thread() -> Iterator[Path]:
    """A folder to work in, and PyTorch on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    finally:
        torch.set_num_threads(threads)


def sound(seconds: float, rate: int, seed: int) -> Tensor:
    """Samples [S] of a buzz that comes and goes, with some noise."""
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(round(seconds * rate)) / rate
    buzz = torch.stack([torch.sin(2 * torch.pi * (110 + 5 * seed) * k * t) / k for k in range(1, 12)]).sum(0)
    return 0.2 * buzz * torch.sin(torch.pi * 2 * t) ** 2 + 0.01 * torch.randn(len(t), generator=g)


# --- preparing --------------------------------------------------------------------------------------------------------


def prepare(device: torch.device, small: bool) -> Figures:
    """Seconds of answers a second, prepared from start to end and encoded by the codec alone right beside."""
    count, seconds, rounds = (2, 0.3, 1) if small else (24, 5.0, 3)
    with one_thread() as folder:
        for codec in ("snac", "codec2"):
            weights = str(write_snac(folder / "snac", SNAC_24KHZ | (SMALL_SNAC if small else {}))) if codec == "snac" else ""
            rate = load_codec(codec, weights or None).sample_rate
            sounds = [sound(seconds, rate, seed) for seed in range(count)]
            asked = {"question_audio": SAMPLE_RATE} if codec == "codec2" else {}
            table = write_table(folder / f"{codec}-data", sounds, {"answer_audio": rate, **asked})
            runs = iter(range(2 * rounds + 2))

            def prepared(_: object, codec: str = codec, weights: str = weights, table: Path = table, runs: Any = runs) -> None:
                config = PrepareConfig(codec=codec, codec_folder=weights, workers=0)
                prepare_rows(table, folder / f"{codec}-{next(runs)}", config)

            def alone(_: object, codec: str = codec, weights: str = weights, sounds: Sequence[Tensor] = sounds) -> None:
                coder = load_codec(codec, weights or None)
                for audio in sounds:
                    coder.encode(audio)

            spent = in_turns({"prepared": prepared, "alone": alone}, [None], device, rounds)
            rates = {f"{name} s/s": count * seconds / statistics.median(taken) for name, taken in spent.items()}
            name = f"{codec}, questions read and stored besides" if asked else codec
            yield name, {**rates, "prepared / codec alone": ratio(spent["alone"], spent["prepared"])}


def memory(device: torch.device, small: bool) -> Figures:
    """Peak memory of preparing many short rows, beyond an interpreter that has imported the command.

    Without files it shows whether rows accumulate. It grows for the first rows, as the footer of the open shard does.
    """
    counts, uses = (2, 35) if small else (1000, 10_000, 20_000), []
    with one_thread() as folder:
        for count in counts:
            table = write_table(folder / str(count), [sound(0.16, 8000, 0)], {"answer_audio": 8000}, count)
            words = [str(table), str(folder / f"prepared-{count}"), "--codec=codec2", "--workers=0", "--progress=off"]
            taken = run_apart("train.cli", ["data", "prepare", *words], IMPORTS)
            uses.append(taken)
            figures = {"MiB": taken.resident / 2**20, "without files": taken.anonymous / 2**20, "rows/s": count / taken.seconds}
            yield f"{count:,} short rows", figures
    for (less, fewer), (more, many) in pairwise(zip(counts, uses, strict=True)):
        shares = {"RSS": many.resident / max(fewer.resident, 1), "without files": many.anonymous / max(fewer.anonymous, 1)}
        yield f"{more:,} / {less:,} rows", shares


def write_table(folder: Path, sounds: Sequence[Tensor], rates: Mapping[str, int], count: int | None = None) -> Path:
    """Writes a table of `count` turns with sounds [S] at the rates of their keys, in WAV files that turns share."""
    folder.mkdir(parents=True)
    for key, rate in rates.items():
        for i, audio in enumerate(sounds):
            own = audio if key == "answer_audio" else sound(len(audio) / rates["answer_audio"], rate, i)
            soundfile.write(folder / f"{key}-{i}.wav", own.numpy(), rate)
    with (folder / "rows.jsonl").open("w") as file:
        for i in range(count or len(sounds)):
            turn = {"id": f"r{i}", "question_text": f"what is {i}", "answer_text": f"it is {i}"}
            file.write(json.dumps(turn | {key: f"{key}-{i % len(sounds)}.wav" for key in rates}) + "\n")
    return folder / "rows.jsonl"


def write_snac(folder: Path, config: Mapping[str, Any]) -> Path:
    """Makes a SNAC's folder, its weights random."""
    from snac import SNAC

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch.jit.script, which the package uses
        torch.manual_seed(0)
        state = SNAC(**config).state_dict()
    folder.mkdir()
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(dict(config)))
    return folder


# --- reading ----------------------------------------------------------------------------------------------------------


def reading(device: torch.device, small: bool) -> Figures:
    """Rows packed a minute, and the time to the first batch from where a run opens its data, of little and much data."""
    counts, shard, steps, repeat = ((10, 70), 30, 1, 1) if small else ((1000, 400_000), 256, 4, 3)
    with one_thread() as folder:
        write_shards(folder / "warm", KINDS, KINDS)
        next(_open(folder / "warm", small))  # imports
        for count in counts:
            files = write_shards(folder / str(count), count, shard)
            times = [_first_and_rate(partial(_open, folder / str(count), small), steps) for _ in range(repeat)]
            fresh, again, rate = (statistics.median(values) for values in zip(*times, strict=True))
            name = f"{count:,} rows in {files} file{'s' * (files > 1)}"
            yield name, {"rows a minute": rate, "first batch s": fresh, "resumed s": again}
        data = folder / str(counts[-1])
        for name, window in (("random", None), ("sequential", WINDOW)):
            yield f"order {name}", _in_order(_open(data, small, window=window), data, 10 * steps)


def _first_and_rate(opened: Callable[..., StepLoader], steps: int) -> tuple[float, float, float]:
    """Seconds to the first batch, and to that of a run that goes on after some steps; rows a minute in between."""
    start = time.perf_counter()
    loader = opened()
    next(loader)
    begun = time.perf_counter()
    examples = sum(batch.examples for _ in range(steps) for batch in next(loader))
    rate = 60 * examples / (time.perf_counter() - begun)
    states = json.loads(json.dumps(loader.states))
    again = seconds_of(lambda: next(opened(step=loader.step, states=states)), torch.device("cpu"))
    return begun - start, again, rate


def _in_order(loader: StepLoader, data: Path, batches: int) -> dict[str, float]:
    """Rows a minute, and the bytes that are read over those of the columns that examples need, where the system counts them."""
    file = pq.read_metadata(next(data.glob("*.parquet")))
    needed, groups = set(leaf_paths(file, NEEDED.first)), [file.row_group(number) for number in range(file.num_row_groups)]
    chunks = (group.column(number) for group in groups for number in range(group.num_columns))
    used = sum(chunk.total_compressed_size for chunk in chunks if chunk.path_in_schema in needed) / file.num_rows
    next(loader)
    (state,) = loader.states.values()
    rows, read, start = state["next"], _read_bytes(), time.perf_counter()
    examples = sum(batch.examples for _ in range(batches) for batch in next(loader))
    figures = {"rows a minute": 60 * examples / (time.perf_counter() - start)}
    (state,) = loader.states.values()
    if read is not None:
        figures["bytes read / needed"] = (_read_bytes() - read) / used / (state["next"] - rows)
    return figures


def _read_bytes() -> Any:
    """Bytes that this process has read so far; None where the system does not count them."""
    counters = getattr(psutil.Process(), "io_counters", None)
    return getattr(counters(), "read_chars", None) if counters is not None else None


def _open(
    data: Path, small: bool, step: int = 0, states: Mapping[str, Any] | None = None, window: int | None = None
) -> StepLoader:
    """Opens a loader over stored rows, as a run does."""
    maker = ExampleMaker(preset("nano"), Tokenizer.bytes(), load_codec("codec2"))
    source = StoredRows(data, needed=NEEDED, window=window)
    windows = {} if source.windows is None else {0: source.windows}
    packing = PackingConfig(2, 128, 3) if small else PackingConfig()
    pipeline = Pipeline(Mixture([source], [1.0], windows=windows), [TaskMixture(TASKS)], maker, packing)
    return StepLoader(pipeline, 1, start_step=step, states=states)


def write_shards(folder: Path, count: int, shard: int) -> int:
    """Writes `count` short rows: half a second asked, a sentence and a second of Codec2 answered. Returns the number of files.

    Equal files are hard links to one file, where the disk has these. Beside them is a report with their sizes.
    """
    g = torch.Generator().manual_seed(0)
    rows = []
    for i in range(KINDS):
        codes = Codes("codec2", torch.randint(16, (4, 25), generator=g))
        asked = Sound(sound(0.5, SAMPLE_RATE, i), SAMPLE_RATE)
        turn = RowTurn(f"what is {i} and {i + 1}?", asked, f"it is {i} and {i + 1}.", answer_codes=codes)
        rows.append(Row((turn,), id=str(i)))
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
    files = enumerate(sorted(folder.glob("*.parquet")))
    shards = [{"file": path.name, "rows": sizes[i], "bytes": path.stat().st_size} for i, path in files]
    (folder / "report.json").write_text(json.dumps({"shards": shards}))
    return len(sizes)


CHECKS = {check.__name__: check for check in (prepare, memory, reading)}

if __name__ == "__main__":
    sys.exit(run_checks(CHECKS, __doc__.partition("\n")[0]))
