"""Rows to look at: sound ones, and what is done to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from omni.codec import registry as codecs
from omni.codec.base import AudioCodec, CodecStream
from omni.errors import UserError
from tests.sounds import encoded
from train.data.rows.parquet import write_rows
from train.data.rows.row import Codes, Row, RowTurn, Sound, features, to_plain
from train.data.seeding import seeded_generator

RATE = 8000
SIZES = {"codec2": (512, 512, 16, 64), "snac": (4096,) * 7}
FRAME_RATES = {"codec2": 25.0, "snac": 24000 / 2048}
WORDS = ["nought", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def noise(seconds: float, *key: int | str) -> Tensor:
    """Sound [S] that differs by key."""
    return (torch.rand(round(seconds * RATE), generator=seeded_generator(*key)) - 0.5) * 0.5


def wav(samples: Tensor, rate: int = RATE) -> bytes:
    """A WAV file of 16 bits."""
    return encoded(samples.numpy(), rate=rate)


def row(index: int, codec: str = "codec2", **changes: Any) -> Row:
    """A row that nothing is wrong with; `changes` are of its turn, or of the row itself."""
    words = " ".join(WORDS[int(digit)] for digit in str(index + 100))
    seconds = 0.1 * len(words)
    frames = round(seconds * FRAME_RATES[codec])
    codes = torch.stack([torch.randint(size, (frames,), generator=seeded_generator("codes", index)) for size in SIZES[codec]])
    turn = RowTurn(
        question_text=f"say {words}",
        question_audio=Sound(data=wav(noise(seconds, "question", index))),
        answer_text=words,
        answer_audio=Sound(data=wav(noise(seconds, "answer", index))),
        answer_codes=Codes(codec, codes),
    )
    of_row = {name: changes.pop(name) for name in ("id", "source", "language", "speaker", "task", "version") if name in changes}
    fields = {"id": f"r{index}", "source": "toy", "speaker": f"s{index % 3}", **of_row}
    return Row((replace(turn, **changes),), **fields)


def stored(folder: Path, rows: Sequence[Row], per_file: int = 8, row_group: int = 4) -> Path:
    """Rows in files of a folder."""
    for start in range(0, len(rows), per_file):
        write_rows(folder / f"rows-{start // per_file:05d}.parquet", rows[start : start + per_file], row_group)
    return folder


def spoilt(folder: Path, *changes: Callable[[dict[str, Any]], None]) -> Path:
    """Sound rows 0 to 3 in one file, and between them one for each change, made to its first turn as it is stored."""
    plain = [to_plain(row(i)) for i in range(4 + len(changes))]
    for stored_row, change in zip(plain[2:], changes, strict=False):
        change(stored_row["turns"][0])
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(plain, schema=features().arrow_schema), folder / "rows.parquet")
    return folder


def setting(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change that sets a field of a stored turn."""
    return lambda turn: turn.update({name: value})


def codes_with_null(turn: dict[str, Any]) -> None:
    turn["answer_codes"]["frames"][1][0] = None


path_with_nul = setting("question_audio", {"bytes": None, "path": "a\0b"})
path_too_long = setting("question_audio", {"bytes": None, "path": "a" * 5000})
word_without_time = setting("words", [{"text": None, "start": None, "end": None, "who": "user"}])
foreign_codes = setting("answer_codes", {"codec": "hubert", "order": "streams", "frames": [[7] * 25]})
large_code = setting("answer_codes", {"codec": "mystery", "order": "streams", "frames": [[2_000_000_000, 1]]})
BAD_PARTS = (path_with_nul, path_too_long, word_without_time, codes_with_null)


def only_snac(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of any folder named snac are SNAC's, those of others are no codec's."""

    def loader(name: str) -> Callable[[Path | None, torch.device], AudioCodec]:
        def load(folder: Path | None, device: torch.device) -> AudioCodec:
            if folder is None or folder.name != name:
                raise UserError(f"{folder} holds no {name}")
            return Beeper(name)

        return load

    for name in sorted(codecs.CODECS):
        if name != "codec2":
            monkeypatch.setitem(codecs.CODECS, name, replace(codecs.CODECS.find(name), load=loader(name)))


def beeping(name: str, load: Any = None) -> codecs.CodecSpec:
    """The specification of a `Beeper` of that name; one without weights, unless `load` makes it."""
    known = {"sample_rate": 8000, "frame_rate": 80.0, "codebook_sizes": SIZES[name]}
    weights = {"load": lambda folder, device: Beeper(name), "weights": ""} if load is None else {"load": load}
    return replace(codecs.CODECS[name], **known, **weights)


class Beeper(AudioCodec):
    """A codec that sounds each frame as a step of its first code."""

    sample_rate, frame_samples = 8000, 100

    def __init__(self, name: str) -> None:
        self.name, self.codebook_sizes = name, SIZES[name]

    def stream(self, seed: int = 0) -> CodecStream:
        return _Beeps(self)

    def _encode(self, audio: Tensor) -> Tensor:
        raise UserError("it only speaks")


class _Beeps(CodecStream):
    def _push(self, codes: Tensor) -> Tensor:
        return (codes[0].float() / self.codec.codebook_sizes[0]).repeat_interleave(100)

    def _finish(self) -> Tensor:
        return torch.empty(0)
