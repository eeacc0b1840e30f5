"""Measures the cost of `omni-train data prepare` beside its codec, and the memory that many rows take."""

from __future__ import annotations

import json
import statistics
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import soundfile
import torch
from torch import Tensor

from benchmarks.child import ResourceUse, run_apart
from benchmarks.timing import TimingRow
from omni.audio.io import SAMPLE_RATE
from omni.codec.registry import load_codec
from omni.codec.snac import SNAC_24KHZ
from omni.errors import UserError
from omni.profiling import ratio, seconds_of
from train.data.prepare.config import PrepareConfig
from train.data.prepare.prepare import prepare as prepare_rows

MIB = 1 << 20
CPU = torch.device("cpu")
IMPORTS = ("torch", "torchaudio", "soundfile", "datasets", "pyarrow.parquet", "train.data.prepare.prepare", "omni.codec.codec2")
"""Modules that the command imports only after its start."""
SHORT = 0.16
"""Seconds of the answers of which many are prepared: four frames of Codec2."""


def prepare(
    clips: int = 24, seconds: float = 5.0, counts: Sequence[int] = (1000, 10_000, 20_000), rounds: int = 3,
    snac: Mapping[str, Any] = SNAC_24KHZ,
) -> list[TimingRow]:  # fmt: skip
    """Measures rates on one core, and peak memory.

    Each round prepares the same recordings with the codec, from the command's start to its end (but in this process), and
    encodes them with the codec alone, already read and at its sample rate, right after; a ratio is that of one such pair. Both
    load the codec first.

    Args:
        clips, seconds: how many answers, and how long each is.
        counts: numbers of rows whose peak memory is compared; the cheapest that go through all of the command: a short text,
            and a short answer that is read, encoded to Codec2 and stored.
        snac: configuration of a SNAC, whose weights are random.
    """
    with tempfile.TemporaryDirectory() as place, one_thread():
        folder = Path(place)
        weights = write_snac(folder / "snac", snac)
        rows = _rates("SNAC's size", folder, "snac", str(weights), clips, seconds, rounds)
        rows += _rates("Codec2", folder, "codec2", "", clips, seconds, rounds, asked=True)
        return rows + _memory(folder, counts)


def _rates(
    name: str, folder: Path, kind: str, weights: str, clips: int, seconds: float, rounds: int, asked: bool = False
) -> list[TimingRow]:
    """Measures seconds of answers that are prepared in a second, and those that the codec alone encodes."""
    rate = load_codec(kind, weights or None).sample_rate
    sounds = [sound(seconds, rate, seed) for seed in range(clips)]
    data = write_table(folder / f"{kind}-data", sounds, rate, asked)
    config = PrepareConfig(codec=kind, codec_folder=weights, workers=0)

    def alone() -> None:
        codec = load_codec(kind, weights or None)
        for one in sounds:
            codec.encode(one)

    prepare_rows(data, folder / f"{kind}-warm", replace(config, limit=1))
    prepared, bare = [], []
    for turn in range(rounds):
        out = folder / f"{kind}-{turn}"
        prepared.append(clips * seconds / seconds_of(partial(prepare_rows, data, out, config), CPU))
        bare.append(clips * seconds / seconds_of(alone, CPU))
    besides = ", questions read and stored besides" if asked else ""
    return [
        TimingRow(f"{name}: answers encoded by the codec alone, one core", statistics.median(bare), "s/s"),
        TimingRow(f"{name}: answers prepared, one core{besides}", statistics.median(prepared), "s/s"),
        TimingRow(f"{name}: rate, prepared / codec alone", ratio(prepared, bare), "x"),
    ]


def _memory(folder: Path, counts: Sequence[int]) -> list[TimingRow]:
    """Measures peak memory of preparing so many short rows in one process, beyond an interpreter that has imported the command.

    RSS includes pages of libraries that are touched only during work; the ratio without files shows whether rows accumulate in
    memory. It is above 1 for the first rows, as the footer of the open shard grows until that shard is full.
    """
    rows, taken = [], list[ResourceUse]()
    wav = folder / "short.wav"
    soundfile.write(wav, sound(SHORT, 8000, 0).numpy(), 8000)
    for count in counts:
        data = folder / f"short-{count}.jsonl"
        with data.open("w") as file:
            for i in range(count):
                turn = {"id": f"r{i}", "question_text": f"what is {i}", "answer_text": f"it is {i}", "answer_audio": wav.name}
                file.write(json.dumps(turn) + "\n")
        arguments = [str(data), str(folder / f"prepared-{count}"), "--codec=codec2", "--workers=0", "--progress=off"]
        taken.append(run_apart("train.commands.data_prepare", arguments, IMPORTS))
        rows += [
            TimingRow(f"{count:,} short rows: peak RSS", taken[-1].resident / MIB, "MiB"),
            TimingRow(f"{count:,} short rows: peak RSS without files", taken[-1].anonymous / MIB, "MiB"),
            TimingRow(f"{count:,} short rows: prepared, start and end included", count / taken[-1].seconds, "/s"),
        ]
    for (few, less), (many, more) in pairwise(zip(counts, taken, strict=True)):
        what = f"{many:,} / {few:,} rows"
        rows.append(TimingRow(f"peak RSS, {what}", more.resident / max(less.resident, 1), "x"))
        rows.append(TimingRow(f"peak RSS without files, {what}", more.anonymous / max(less.anonymous, 1), "x"))
    return rows


def sound(seconds: float, rate: int, seed: int) -> Tensor:
    """Samples [S] of a buzz that comes and goes, with some noise."""
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(round(seconds * rate)) / rate
    buzz = torch.stack([torch.sin(2 * torch.pi * (110 + 5 * seed) * k * t) / k for k in range(1, 12)]).sum(0)
    return 0.2 * buzz * torch.sin(torch.pi * 2 * t) ** 2 + 0.01 * torch.randn(len(t), generator=g)


def write_table(folder: Path, answers: Sequence[Tensor], rate: int, asked: bool) -> Path:
    """Writes a table of spoken answers [S] at `rate` and, if `asked`, of spoken questions as long, with their WAV files."""
    folder.mkdir(parents=True)
    with (folder / "rows.jsonl").open("w") as file:
        for i, answer in enumerate(answers):
            turn = {"id": f"r{i}", "question_text": f"what is {i}", "answer_text": f"it is {i}", "answer_audio": f"a{i}.wav"}
            soundfile.write(folder / f"a{i}.wav", answer.numpy(), rate)
            if asked:
                turn["question_audio"] = f"q{i}.wav"
                soundfile.write(folder / f"q{i}.wav", sound(len(answer) / rate, SAMPLE_RATE, i).numpy(), SAMPLE_RATE)
            file.write(json.dumps(turn) + "\n")
    return folder / "rows.jsonl"


def write_snac(folder: Path, config: Mapping[str, Any]) -> Path:
    """Makes a SNAC's folder, its weights random; UserError where the package is not installed."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch.jit.script, which the package uses
        try:
            from snac import SNAC
        except ImportError as error:
            raise UserError('SNAC needs the package snac: pip install "omni-speech[snac]"') from error
        torch.manual_seed(0)
        state = SNAC(**config).state_dict()
    folder.mkdir()
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(dict(config)))
    return folder


@contextmanager
def one_thread() -> Iterator[None]:
    """A context in which PyTorch computes with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
