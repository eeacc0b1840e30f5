"""Small models, a codec and a source for the tests of the data: cheap, seeded, no optional parts."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import torch
from torch import Tensor

from omni.codec.base import AudioCodec, CodecStream
from omni.config import DecoderConfig, ModelConfig, ProjectorConfig
from omni.encoder.whisper_config import WhisperConfig
from omni.layout import Layout
from omni.text import Tokenizer
from train.data.batching.examples import ExampleMaker
from train.data.batching.loader import Pipeline
from train.data.config import PackingConfig
from train.data.rows.parquet import write_rows
from train.data.rows.row import Codes, Row, RowTurn, Sound
from train.data.seeding import key, seeded_rng
from train.data.sources.mixture import Mixture, TaskMixture

TOKENIZER = Tokenizer.bytes()
ENCODER = WhisperConfig(width=16, heads=2, layers=1, window_seconds=2.0)
DECODER = DecoderConfig(width=32, layers=2, heads=4, kv_heads=2, mlp_width=48)
MODELS = {
    "codec2": ModelConfig(
        Layout.build([12, 12, 6, 8], 256, specials=8), ENCODER, ProjectorConfig("linear", stack=2), DECODER, codec="toy4"
    ),
    "mini-omni": ModelConfig(
        Layout.build([16] * 7, 256, specials=5, fill="sampled"),
        replace(ENCODER, hop=320),
        ProjectorConfig("gated", hidden=24),
        DECODER,
        codec="toy7",
    ),
}
TASKS = {"A1A2": 0.4, "A1T1": 0.3, "T1A2": 0.2, "T1T2": 0.1}


class ToyCodec(AudioCodec):
    """Codes that count the frame's loud samples; enough to check who encodes what."""

    sample_rate = 8000
    frame_samples = 320

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.name = f"toy{len(sizes)}"
        self.codebook_sizes = sizes

    def stream(self, seed: int = 0) -> CodecStream:
        raise NotImplementedError("the toy codec does not speak")

    def _encode(self, audio: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(audio, (0, -len(audio) % self.frame_samples)).view(-1, self.frame_samples)
        loud = (padded > 0).sum(1)
        return torch.stack([loud % size for size in self.codebook_sizes])


class ToySource:
    """Rows of noise: `size` of them, or no end; each with a length, a text and codes of its own."""

    def __init__(self, name: str, size: int | None, codec: AudioCodec, turns: int = 1, repeat: int = 1, seconds: float = 0.6):
        self.name, self.size, self.codec, self.turns, self.repeat, self.seconds = name, size, codec, turns, repeat, seconds
        self.made: list[int] = []

    @property
    def repeats(self) -> bool:
        return self.repeat > 1

    def identity(self, index: int) -> int:
        return index // self.repeat

    def row(self, index: int) -> Row:
        self.made.append(index)
        rng = seeded_rng(self.name, self.identity(index))
        g = torch.Generator().manual_seed(key(self.name, self.identity(index)))
        turns = []
        for _ in range(rng.randint(1, self.turns)):
            samples = rng.randint(800, int(16000 * self.seconds))
            frames = rng.randint(1, 20)
            codes = torch.stack([torch.randint(size, (frames,), generator=g) for size in self.codec.codebook_sizes])
            turns.append(
                RowTurn(
                    question_text="".join(rng.choices("abc ", k=rng.randint(1, 12))) + "?",
                    question_audio=Sound(torch.randn(samples, generator=g) * 0.1, 16000),
                    answer_text="".join(rng.choices("xyz", k=rng.randint(1, 9))),
                    answer_codes=Codes(self.codec.name, codes),
                )
            )
        return Row(tuple(turns), source=self.name, where=f"{self.name} row {index}")


def codec_of(model: ModelConfig) -> ToyCodec:
    return ToyCodec(model.layout.codebook_sizes)


def maker_of(model: ModelConfig, **options) -> ExampleMaker:
    return ExampleMaker(model, TOKENIZER, codec_of(model), **options)


def pipeline_of(
    model: ModelConfig,
    sizes=(None, 7),
    weights=(2, 1),
    turns: int = 1,
    repeat: int = 1,
    packing: PackingConfig | None = None,
    seed: int = 3,
    kept: int = 99,
    **options,
) -> Pipeline:
    """A mixture of an endless and a small finite source."""
    codec = codec_of(model)
    sources = [ToySource(f"toy{i}", size, codec, turns, repeat) for i, size in enumerate(sizes)]
    return Pipeline(
        Mixture(sources, weights, seed),
        [TaskMixture(TASKS)] * len(sources),
        maker_of(model, **options),
        packing or PackingConfig(rows=2, length=160, buffer=6),
        seed,
        kept,
    )


def report(folder: Path) -> None:
    """Write what the report of `data prepare` would say of a folder's files."""
    files = sorted(folder.glob("*.parquet"))
    counts = [pq.read_metadata(io.BytesIO(file.read_bytes())).num_rows for file in files]
    shards = [{"file": f.name, "rows": n, "bytes": f.stat().st_size} for f, n in zip(files, counts, strict=True)]
    (folder / "report.json").write_text(json.dumps({"shards": shards}))


def write_shards(folder: Path) -> Path:
    """Three files of 5, 7 and 4 rows, in groups of 3."""
    source, first = ToySource("toy", None, codec_of(MODELS["codec2"])), 0
    for number, count in enumerate((5, 7, 4)):
        write_rows(folder / f"rows-{number:05d}.parquet", map(source.row, range(first, first + count)), 3)
        first += count
    return folder
