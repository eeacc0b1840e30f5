"""Standard input that is heard while it comes equals the file, and is heard before it ends."""

from __future__ import annotations

import io
import json
import os
import struct
import threading
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from omni.audio.io import read_audio
from omni.audio.wav import SampleForm, wav_form
from omni.checkpoint.folder import save_folder
from omni.generate.listening import FeatureStream
from omni.text import Tokenizer
from tests.infer.conftest import TINY, tiny_model, write_question

CHUNKED = replace(TINY, encoder=replace(TINY.encoder, mode="chunked", chunk_ms=160, window_seconds=3.0))  # type: ignore[type-var]


@pytest.fixture(scope="module")
def listening(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models") / "listening"
    weights = tiny_model().state_dict()
    name = "encoder.whisper.positional_embedding"
    weights[name] = weights[name][: CHUNKED.encoder.positions]  # type: ignore[attr-defined]
    save_folder(place, CHUNKED, weights, Tokenizer.bytes())
    return place


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Samples that were encoded before the questions had ended."""
    found: list[int] = []
    encode = FeatureStream._encode

    def watched(self: FeatureStream, samples: int, last: bool = False) -> None:
        if not last:
            found.append(samples)
        encode(self, samples, last)

    monkeypatch.setattr(FeatureStream, "_encode", watched)
    return found


def ask(run: Any, monkeypatch: pytest.MonkeyPatch, listening: Path, data: bytes, *more: object) -> Any:
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(buffer=io.BytesIO(data)))
    words = ("--model", listening, "--max_seconds", "0.4", "--json", *more)
    return run("ask", "-", *words)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rate", [16_000, 24_000])
@pytest.mark.parametrize("subtype", ["PCM_16", "FLOAT", "PCM_24"])
def test_a_pipe_is_answered_as_the_file(
    run: Any, listening: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: int, subtype: str
) -> None:
    question = write_question(tmp_path / "q.wav", 1.3, rate=rate, subtype=subtype)
    done = run("ask", "q.wav", "--model", listening, "--max_seconds", "0.4", "--json")
    wanted = json.loads(done.text)
    found = ask(run, monkeypatch, listening, question.read_bytes())
    assert found.code == 0, found.err
    told = json.loads(found.text)
    assert told["question"] == "-"
    assert all(told[name] == wanted[name] for name in ("task", "text", "audio", "seconds", "ended", "warnings", "error"))
    if subtype == "PCM_16":
        raw = soundfile.read(question, dtype="int16")[0].tobytes()
        assert json.loads(ask(run, monkeypatch, listening, raw, "--input_rate", rate).text)["text"] == wanted["text"]


@pytest.mark.parametrize("kind", ["raw", "wav"])
def test_it_is_heard_before_it_ends(
    run: Any, listening: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunks: list[int], kind: str
) -> None:
    data = write_question(tmp_path / "q.wav", 1.3).read_bytes()
    if kind == "raw":
        data = data[44:]
    out, into = os.pipe()
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(buffer=os.fdopen(out, "rb")))

    def write() -> None:
        with os.fdopen(into, "wb", buffering=0) as pipe:
            for at in range(0, len(data), 1000):
                pipe.write(data[at : at + 1000])
            end = threading.Event()
            for _ in range(2000):
                if len(chunks) >= 8:
                    break
                end.wait(0.01)
            before.append(len(chunks))

    before: list[int] = []
    thread = threading.Thread(target=write)
    thread.start()
    done = run("ask", "-", "--model", listening, "--max_seconds", "0.4")
    thread.join()
    assert done.code == 0 and before == [8]  # all whole chunks of 1.3 s, while the pipe was open


@pytest.mark.parametrize("listens", [True, False])
def test_an_endless_stream_is_refused_as_soon_as_it_is_too_long(
    run: Any, listening: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, listens: bool
) -> None:
    class Endless(io.RawIOBase):
        taken = 0

        def read(self, size: int = -1) -> bytes:
            threading.Event().wait(0.001)
            self.taken += size
            return b"\1\0" * (size // 2)

    pipe = Endless()
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(buffer=pipe))
    monkeypatch.setattr("infer.audio.MAX_SECONDS", 2.0 if not listens else 30.0)
    done = run("ask", "-", "--model", listening if listens else folder)
    assert done.code == 2 and ("at most 3 s are taken" if listens else "continues after 2 s") in done.err, done.err
    assert listens or pipe.taken < 100_000
    pipe.close()


class Waiting(io.BytesIO):
    """A pipe that ends once so many chunks of it were encoded."""

    def __init__(self, data: bytes, chunks: list[int], count: int) -> None:
        super().__init__(data)
        self._chunks, self._count = chunks, count

    def read(self, size: int | None = -1) -> bytes:
        block = super().read(size)
        for _ in range(2000):
            if block or len(self._chunks) >= self._count:
                break
            threading.Event().wait(0.01)
        return block


@pytest.mark.long
def test_channels_of_a_wav(
    run: Any, listening: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunks: list[int]
) -> None:
    heard: list[torch.Tensor] = []
    push = FeatureStream.push

    def watched(self: FeatureStream, samples: torch.Tensor) -> None:
        heard.append(samples)
        push(self, samples)

    monkeypatch.setattr(FeatureStream, "push", watched)
    g = np.random.default_rng(0)
    for name, samples in {
        "two": g.normal(0, 0.1, (9000, 2)),
        "opposite": np.outer(g.normal(0, 0.1, 9000), [1, -1]),
        "three": g.normal(0, 0.1, (9000, 3)),
    }.items():
        place = tmp_path / f"{name}.wav"
        soundfile.write(place, samples.astype(np.float32), 16_000)
        for channel in (None, 1):
            if (name, channel) == ("three", None):
                continue
            more = () if channel is None else ("--channel", channel)
            words = ("--model", listening, "--max_seconds", "0.4", "--json", *more)
            wanted = json.loads(run("ask", place, *words).text)
            heard.clear()
            chunks.clear()
            monkeypatch.setattr("sys.stdin", types.SimpleNamespace(buffer=Waiting(place.read_bytes(), chunks, 3)))
            found = json.loads(run("ask", "-", *words).text)
            assert len(chunks) == 3 and len(found["warnings"]) == len(wanted["warnings"])
            assert found["text"] == wanted["text"]
            if (name, channel) != ("opposite", None):  # whose louder channel is taken once it has ended
                sound = read_audio(place, channel="mix" if channel is None else channel)
                torch.testing.assert_close(torch.cat(heard), sound, rtol=0, atol=1e-6)


def test_headers() -> None:
    def header(tag: int, bits: int, channels: int = 1, size: int = 100, before: bytes = b"", extra: bytes = b"") -> bytes:
        fmt = struct.pack("<HHIIHH", tag, channels, 16_000, 0, 0, bits) + extra
        chunk = b"fmt " + struct.pack("<I", len(fmt)) + fmt
        return b"RIFF\0\0\0\0WAVE" + before + chunk + b"data" + struct.pack("<I", size) + b"\0" * 4000

    assert wav_form(header(1, 16)) == SampleForm(16_000, 1, "<i2", 44, 144)
    assert wav_form(header(3, 32, 2, 0xFFFFFFFF)) == SampleForm(16_000, 2, "<f4", 44, None)
    assert wav_form(header(1, 16, size=0, before=b"LIST\3\0\0\0abc\0")) == SampleForm(16_000, 1, "<i2", 56, None)
    extensible = b"\x16\0" + b"\0" * 6 + struct.pack("<H", 1) + b"\0" * 14
    assert wav_form(header(0xFFFE, 16, extra=extensible)) == SampleForm(16_000, 1, "<i2", 68, 168)
    for odd in (
        header(1, 24),
        header(6, 8),
        header(1, 16, channels=0),
        header(1, 16)[:40],
        b"",
        b"OggS",
        b"RIFF\0\0\0\0WAVEdata",
    ):
        assert wav_form(odd) is None
