"""Two hundred malformed and unusual sounds: each is answered or refused in a line, nothing is read without end, and nothing
half-written is left."""

from __future__ import annotations

import io
import json
import os
import types

import numpy as np
import pytest

from infer.audio import PipeReader
from infer.options import AskOptions
from omni.errors import UserError
from tests.infer.odd_sounds import NOISE, odd_sounds
from tests.sounds import encoded

SOUNDS = dict(odd_sounds())
PARTS = 16


@pytest.fixture(autouse=True)
def loaded(lm, monkeypatch) -> None:
    """The tiny model is read once for all."""
    monkeypatch.setattr("infer.checks.check_model", lambda folder: None)
    monkeypatch.setattr("infer.loading.SpeechLM", types.SimpleNamespace(from_pretrained=lambda *_, **__: lm))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("part", range(PARTS))
def test_each_is_answered_or_refused_in_a_line(part, run, tmp_path, monkeypatch):
    assert len(SOUNDS) >= 200
    options = AskOptions(files=("q",), model=".", out="a.wav", max_seconds=0.04, json=True)
    monkeypatch.setattr("infer.cli.parse", lambda words: options)  # which would take most of the time
    for name in list(SOUNDS)[part::PARTS]:
        (tmp_path / "q").write_bytes(SOUNDS[name])
        done = run("ask")
        lines = done.err.splitlines()
        assert done.code == (0 if name.startswith("good") else 2 if name.startswith("bad") else done.code), (name, done)
        assert done.code in (0, 2) and "Traceback" not in done.err, (name, done)
        assert all(len(line) < 500 for line in lines), (name, done)
        if done.code == 0:
            assert json.loads(done.text)["warnings"] == [line.removeprefix("warning: ") for line in lines], (name, done)
            (tmp_path / "a.wav").unlink()
        else:
            assert done.out == b"" and len(lines) == 1 and lines[0].startswith("error: "), (name, done)
        assert os.listdir(tmp_path) == ["q"], name


def piped(data: bytes, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(buffer=io.BytesIO(data)))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("form", ["WAV", "FLAC", "OGG", "MP3", "AIFF", "AU", "CAF", "W64", "RF64", "NIST"])
def test_a_file_on_standard_input_is_heard_as_what_it_is(form, run, tmp_path, monkeypatch):
    subtype = {"OGG": "VORBIS", "MP3": "MPEG_LAYER_III"}.get(form, "PCM_16")
    data = encoded(np.tile(NOISE, 3), form, subtype, 24000)
    (tmp_path / "q").write_bytes(data)
    words = ["--task", "A1T2", "--max_tokens", "20", "--json"]
    from_file = run("ask", "q", *words)
    piped(data, monkeypatch)
    done = run("ask", "-", *words)
    assert done.code == 0 and json.loads(done.text)["text"] == json.loads(from_file.text)["text"]
    piped(data[: len(data) // 2], monkeypatch)
    done = run("ask", "-", *words)
    assert done.code == 2 and "standard input" in done.err


@pytest.mark.parametrize("name", [n for n in SOUNDS if n.startswith(("bad text", "bad JSON", "bad HTML", "bad b'%PDF"))])
def test_what_is_no_sound_is_not_taken_for_raw_pcm(name, run, monkeypatch):
    piped(SOUNDS[name][: len(SOUNDS[name]) // 2 * 2], monkeypatch)
    done = run("ask", "-")
    assert done.code == 2 and "standard input is not sound but" in done.err and done.out == b""


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/urandom"])
def test_a_device_is_refused_by_its_beginning(device, run, tmp_path):
    done = run("ask", device)
    assert done.code == 2 and device in done.err and done.err.count("\n") == 1 and os.listdir(tmp_path) == []


@pytest.mark.parametrize(("error", "said"), [(MemoryError(), "MemoryError"), (ValueError("read of closed file"), "closed")])
def test_standard_input_that_breaks_is_no_question_cut_short(error, said):
    class Breaking(io.RawIOBase):
        begun = False

        def read(self, size: int = -1) -> bytes:
            if self.begun:
                raise error
            self.begun = True
            return b"\1\0" * (size // 2)

    with pytest.raises(UserError, match=f"standard input cannot be read .*{said}"):
        PipeReader(Breaking(), 16000).take()
