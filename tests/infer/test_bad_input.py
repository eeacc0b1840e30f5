"""Whatever is wrong is said in one line that names it, with exit code 2, and nothing half-written is left."""

from __future__ import annotations

import io
import re
import shutil
import types

import numpy as np
import pytest
import soundfile

from infer.options import in_options
from tests.infer.conftest import in_file, write_question


def sound(name: str, tmp_path, data=None, rate: int = 16000, **more) -> str:
    path = tmp_path / name
    soundfile.write(path, np.zeros(1600, np.float32) if data is None else data, rate, **more)
    return name


def truncated(tmp_path) -> str:
    whole = write_question(tmp_path / "whole.wav", seconds=2).read_bytes()
    (tmp_path / "truncated.wav").write_bytes(whole[: len(whole) // 2])
    return "truncated.wav"


def plain(name: str, content: bytes, tmp_path) -> str:
    (tmp_path / name).write_bytes(content)
    return name


QUESTIONS = {
    "missing": (lambda p: "none.wav", "none.wav", "No such file"),
    "folder": (lambda p: (p / "d.wav").mkdir() or "d.wav", "d.wav", "folder"),
    "truncated": (truncated, "truncated.wav", "truncated"),
    "nan": (lambda p: sound("nan.wav", p, np.full(1600, np.nan, np.float32), subtype="FLOAT"), "nan.wav", "NaN"),
    "channels": (lambda p: sound("many.wav", p, np.zeros((1600, 8), np.float32)), "8 channels", "--channel"),
    "long": (lambda p: sound("long.wav", p, np.zeros(31 * 16000, np.float32)), "long.wav: the question lasts 31 s", "cut it"),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_bad_question_is_refused(name, run, tmp_path):
    make, *parts = QUESTIONS[name]
    file = make(tmp_path)
    before = sorted(tmp_path.iterdir())
    check(run("ask", file), *parts)
    assert sorted(tmp_path.iterdir()) == before


WORDS = {
    "no command": ([], "no command", "ask"),
    "unknown option": (["ask", "q.wav", "--modle", "x"], "--modle", "did you mean --model?"),
    "task of the other kind": (["ask", "q.wav", "--task", "T1A2"], "T1A2", "sound was given"),
    "no question": (["ask"], "no question", "--text"),
    "both kinds": (["ask", "q.wav", "--text", "hi"], "together", "add --chat"),
    "device that is not there": (["ask", "q.wav", "--device", "cuda:97"], "--device 'cuda:97'", "use --device cpu"),
    "quantize on a GPU": (["ask", "q.wav", "--quantize", "int8", "--device", "cuda"], "--quantize 'int8'", "cuda"),
    "out folder": (["ask", "q.wav", "--out", "no/where.wav"], "no/where.wav", "folder"),
    "out is the question": (["ask", "q.wav", "--out", "q.wav"], "also the question"),
    "out of another format": (["ask", "q.wav", "--out", "a.aac", "--model", "no"], "'a.aac': the suffix says"),
    "no adapter": (["ask", "q.wav", "--adapter", "nope"], "adapter nope does not exist"),
    "out where no file can be": (["ask", "q.wav", "--out", "/proc/x.wav", "--model", "no"], "'/proc/x.wav' cannot be written"),
    "json in the pipe": (["ask", "q.wav", "--json", "--out", "-"], "standard output"),
    "default model": (["ask", "q.wav", "--model", "runs/nano/model"], "runs/nano/model", "omni-train demo"),
    "model is a file": (["ask", "q.wav", "--model", "q.wav"], "q.wav", "a file, not a folder"),
}


@pytest.mark.parametrize("name", WORDS)
def test_a_bad_command_line_is_refused(name, run, tmp_path):
    words, *parts = WORDS[name]
    write_question(tmp_path / "q.wav")
    check(run(*words), *parts)
    assert [p.name for p in tmp_path.iterdir()] == ["q.wav"]


MODELS = {
    "truncated": (lambda weights: weights.write_bytes(weights.read_bytes()[:-100]), "truncated"),
    "pickle": (lambda weights: weights.write_bytes(b"PK\x03\x04" + weights.read_bytes()[4:]), "pickle"),
    "no weights": (lambda weights: weights.unlink(), "missing"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_bad_model_is_refused(name, run, folder, tmp_path):
    spoil, why = MODELS[name]
    shutil.copytree(folder, tmp_path / "model")
    spoil(tmp_path / "model" / "model.safetensors")
    check(run("ask", "--text", "hi", "--model", "model"), "model.safetensors", why)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(("data", "part"), [(b"", "without a sample"), (b"\0\1\2", "3 bytes")])
def test_bad_raw_sound_is_refused(data, part, run, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(buffer=io.BytesIO(data)))
    check(run("ask", "-"), part)
    assert list(tmp_path.iterdir()) == []


def test_a_chat_that_is_full_forgets_its_oldest_turns(run, tmp_path):
    full = ("--chat", "--json", *in_file(tmp_path, context=40))
    done = run("ask", "--text", "hello there", "and now?", *full)
    assert done.code == 0 and len(done.text.splitlines()) == 2
    done = run("ask", "--text", "hello there", "and now? " * 9, *full)
    assert done.code == 2 and len(done.text.splitlines()) == 1
    assert "40" in done.err and done.err.startswith("error: ") and "shorten the question, or give a larger context" in done.err


def test_debug_shows_the_traceback_above_the_line(run):
    done = run("ask", "none.wav", "--debug")
    assert done.code == 2 and "Traceback" in done.err and done.err.splitlines()[-1].startswith("error: 'none.wav'")


KEYWORD = re.compile(r"\b[a-z_]+=['\d]|sampling:")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("choose one with channel=0 to channel=7", "choose one with --channel 0 to --channel 7"),
        ("load the model in float32, or fetch it", "use --dtype float32, or fetch it"),
        (
            "'.raw' has no header: give raw PCM with its sample rate instead",
            "'.raw' has no header: pipe raw PCM into - with its --input_rate instead",
        ),
        ("'channel=file.wav' is empty",) * 2,
    ],
)
def test_the_library_s_keywords_are_told_as_options(said, told):
    assert in_options(said) == told


def check(done, *parts: str) -> None:
    """Exit code 2, nothing on standard output, one line that says what is wrong and knows no keyword of Python's."""
    assert not KEYWORD.search(done.err), done.err
    assert done.code == 2, done
    assert done.out == b""
    assert done.err.startswith("error: ") and done.err.count("\n") == 1, done.err
    for part in parts:
        assert part in done.err, done.err
