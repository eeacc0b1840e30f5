"""Where the sound goes: paced, to a loudspeaker (a stand-in), and through real pipes of real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
import soundfile
import torch

from infer.audio import Output, Outputs, Paced
from omni.audio.wav import pcm16
from omni.errors import UserError
from tests.infer.conftest import ROOT, in_file, write_question


class Kept(Output):
    """Keeps what it is given."""

    def __init__(self, fail_at: int | None = None):
        self.chunks: list[float] = []
        self.how = None
        self.fail_at = fail_at
        self.first = threading.Event()

    def write(self, samples):
        if len(self.chunks) == self.fail_at:
            raise BrokenPipeError
        self.chunks.append(float(samples[0]))
        self.first.set()

    def end(self, how):
        self.how = how


def chunk(value: float, samples: int = 10):
    return torch.full((samples,), value)


def test_paced_chunks_come_in_order_and_all_of_them():
    kept = Kept()
    with Outputs([Paced(kept)]) as outputs:
        for n in range(50):
            outputs.write(chunk(float(n)))
    assert kept.chunks == [float(n) for n in range(50)] and kept.how == "done"


def test_nothing_is_passed_on_before_its_time_and_stopping_does_not_wait_for_it():
    kept = Kept()
    paced = Paced(kept, sample_rate=1)
    paced.write(chunk(1.0, samples=100_000))  # plays for a day
    paced.write(chunk(2.0))
    assert kept.first.wait(60)
    paced.end("stopped")
    assert kept.chunks == [1.0] and kept.how == "stopped"


def test_what_goes_wrong_in_the_thread_is_raised_by_the_caller():
    kept = Kept(fail_at=1)
    with pytest.raises(BrokenPipeError), Outputs([Paced(kept)]) as outputs:
        outputs.write(chunk(1.0))
        outputs.write(chunk(2.0))
    assert kept.chunks == [1.0] and kept.how == "failed"


@pytest.mark.parametrize(
    ("error", "how"), [(None, "done"), (KeyboardInterrupt, "stopped"), (SystemExit, "stopped"), (UserError, "failed")]
)
def test_outputs_know_how_the_answer_ended(error, how):
    first, second = Kept(), Kept()
    try:
        with Outputs([first, second]):
            if error:
                raise error
    except BaseException as raised:
        assert type(raised) is error
    assert first.how == second.how == how


def fake_sounddevice(refuse: bool = False):
    class PortAudioError(Exception):
        pass

    class RawOutputStream:
        played = b""
        calls: list[str]

        def __init__(self, samplerate, channels, dtype, latency):
            if refuse:
                raise PortAudioError("Invalid sample rate")
            assert (samplerate, channels, dtype) == (8000, 1, "int16")
            self.calls = []
            module.streams.append(self)

        def write(self, data):
            self.played += data

        def __getattr__(self, name):
            return lambda: self.calls.append(name)

    module = types.SimpleNamespace(RawOutputStream=RawOutputStream, PortAudioError=PortAudioError, streams=[])
    return module


def test_the_loudspeaker_plays_what_the_file_holds(run, tmp_path, monkeypatch):
    device = fake_sounddevice()
    monkeypatch.setitem(sys.modules, "sounddevice", device)
    done = run("ask", "--text", "hi", "--max_seconds", "0.4", "--speaker", "--out", "a.wav")
    assert done.code == 0, done.err
    (stream,) = device.streams
    assert stream.played == soundfile.read(tmp_path / "a.wav", dtype="int16")[0].astype("<i2").tobytes()
    assert stream.calls == ["start", "stop", "close"]


@pytest.mark.parametrize("realtime", [False, True])
def test_a_loudspeaker_that_refuses_leaves_no_file_either(run, tmp_path, monkeypatch, realtime):
    monkeypatch.setitem(sys.modules, "sounddevice", fake_sounddevice(refuse=True))
    done = run("ask", "--text", "hi", "--speaker", "--out", "a.wav", *in_file(tmp_path, realtime=realtime))
    assert done.code == 2 and "8000 Hz" in done.err
    assert list(tmp_path.iterdir()) == []


def start(folder, place, *words: str, **more) -> subprocess.Popen:
    line = [sys.executable, "-m", "infer", "ask", *words, "--model", str(folder)]
    more = {"cwd": place, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(line, env=env, **more)


@pytest.mark.long
def test_a_pipe_into_a_pipe(folder, lm, tmp_path):
    question = write_question(tmp_path / "q.wav")
    raw = soundfile.read(question, dtype="int16")[0].astype("<i2").tobytes()
    with start(folder, tmp_path, "-", "--out", "-", "--max_seconds", "0.8", stdin=subprocess.PIPE) as process:
        out, err = process.communicate(raw, timeout=120)
    assert process.returncode == 0, err
    assert out == pcm16(lm.generate(question, max_seconds=0.8).audio)
    assert b"first audio" in err


@pytest.mark.long
def test_asking_brings_no_compiler_along(folder, lm, tmp_path):
    """Which takes longer to import than a small model takes to answer."""
    write_question(tmp_path / "q.wav")
    code = (
        "import sys; from infer.__main__ import main; code = main(sys.argv[1:]);"
        "print([m for m in ('torch._dynamo', 'torch.distributed.tensor') if m in sys.modules]); sys.exit(code)"
    )
    line = [sys.executable, "-c", code, "ask", "q.wav", "--max_seconds", "0.08", "--model", str(folder)]
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


@pytest.mark.long
def test_a_full_standard_output_ends_the_answer_in_one_line(folder, tmp_path):
    with open("/dev/full", "wb") as full, start(folder, tmp_path, "--text", "hi", stdout=full) as process:
        err = process.stderr.read().decode()
        process.wait(timeout=120)
    assert process.returncode == 1 and err.startswith("error: ") and "No space left" in err and err.count("\n") == 1, err
    assert list(tmp_path.iterdir()) == []


def test_an_error_does_not_wait_for_the_pipe_to_end(tmp_path):
    with start("nowhere", tmp_path, "-", stdin=subprocess.PIPE) as process:
        err = process.stderr.read().decode()
        process.wait(timeout=120)
    assert process.returncode == 2, err
    assert err.startswith("error: ") and "nowhere" in err and err.count("\n") == 1


@pytest.mark.long
def test_a_reader_that_leaves_early_ends_the_process_quietly(folder, tmp_path):
    with start(folder, tmp_path, "--text", "hi", "--out", "-", *in_file(tmp_path, realtime=True)) as process:
        assert len(process.stdout.read(640)) == 640  # the first frame, long before the last
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=120)
    assert process.returncode == 141 and b"Traceback" not in err and b"Exception" not in err, err


@pytest.mark.long
@pytest.mark.usefixtures("terminal_signals")
@pytest.mark.parametrize(
    "number",
    [*(pytest.param(number, marks=pytest.mark.long) for number in (signal.SIGTERM, signal.SIGHUP)), signal.SIGINT],
    ids=lambda number: number.name,
)
def test_a_process_that_is_told_to_stop_leaves_a_whole_file_and_its_report(folder, tmp_path, number):
    with start(folder, tmp_path, "--text", "hi", "--max_seconds", "15", "--json", *in_file(tmp_path, realtime=True)) as process:
        deadline = time.monotonic() + 120
        while not any(p.stat().st_size > 44 for p in tmp_path.glob(".answer.wav.part-*")):
            assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
            time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number and err == (b"interrupted\n" if number == signal.SIGINT else b"")
    assert json.loads(out)["ended"] == "cancelled" and json.loads(out)["audio"] == "answer.wav"
    assert [p.name for p in tmp_path.iterdir()] == ["answer.wav"]
    assert 0 < soundfile.info(tmp_path / "answer.wav").duration < 15
