"""The command line says and plays what the Python door does, in every way out of it."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import threading
import types

import pytest
import soundfile
import torch

from infer.ask import follow
from infer.audio import Outputs, PipeOutput, WavOutput
from infer.timing import AnswerMeter
from omni.audio.io import read_audio
from omni.audio.wav import pcm16
from omni.errors import UserError
from omni.generate.results import AudioChunk, Ended, TextDelta, Timings
from omni.generate.runner import Runner
from omni.generate.sampling import Sampling
from omni.generate.session import Session
from omni.generate.speech_lm import SpeechLM
from tests.infer.conftest import in_file, write_adapter, write_question

FIGURES = re.compile(r"first audio \d+ ms, real-time factor \d+\.\d\d, \d+ underruns?\n")


def samples_of(path) -> bytes:
    data, rate = soundfile.read(path, dtype="int16")
    assert rate == 8000 and data.ndim == 1
    return data.astype("<i2").tobytes()


SETTINGS = {
    "greedy": ([], Sampling(), {}),
    "sampled": (["--temperature", "1", "--top_k", "20"], Sampling(1.0, 20), {"seed": 3}),
    "assisted": (["--temperature", "0.8"], Sampling(0.8), {"text_assist": True}),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SETTINGS)
def test_the_answer_is_that_of_the_python_door(name, run, lm, tmp_path):
    words, sampling, more = SETTINGS[name]
    question = write_question(tmp_path / "q.wav")
    done = run("ask", "q.wav", "--out", "a.wav", "--max_seconds", "0.8", *words, *in_file(tmp_path, **more))
    wanted = lm.generate(question, sampling=sampling, max_seconds=0.8, **more)
    assert done.code == 0, done.err
    assert samples_of(tmp_path / "a.wav") == pcm16(wanted.audio)
    assert done.text.startswith(wanted.text + "\n" if wanted.text else "")
    assert len(FIGURES.findall(done.text)) == 1 and done.text.endswith(FIGURES.findall(done.text)[0])
    assert "a.wav: 0.80 s" in done.text and done.err == ""


def test_an_adapter_answers_beside_the_model(run, lm, folder, tmp_path):
    write_adapter(tmp_path / "mine", 1)
    question = write_question(tmp_path / "q.wav")
    done = run("ask", "q.wav", "--out", "a.wav", "--max_seconds", "0.8", "--adapter", str(tmp_path / "mine"))
    adapted = SpeechLM.from_pretrained(folder)
    adapted.load_adapter(tmp_path / "mine")
    wanted = adapted.generate(question, max_seconds=0.8, adapter="mine")
    assert done.code == 0 and samples_of(tmp_path / "a.wav") == pcm16(wanted.audio)
    assert not torch.equal(wanted.codes, lm.generate(question, max_seconds=0.8).codes)
    done = run("ask", "q.wav", "--adapter", "nowhere")
    assert done.code == 2 and "adapter nowhere does not exist" in done.err


def test_the_pipe_gets_the_samples_of_the_file_and_all_text_goes_to_standard_error(run, tmp_path):
    write_question(tmp_path / "q.wav")
    words = ["ask", "q.wav", "--max_seconds", "0.8"]
    to_file, to_pipe = run(*words), run(*words, "--out", "-")
    assert to_pipe.out == samples_of(tmp_path / "answer.wav")
    assert to_pipe.err.splitlines()[0] == to_file.text.splitlines()[0]
    assert FIGURES.search(to_pipe.err)


@pytest.mark.parametrize("rate", [16000, 8000])
def test_raw_sound_on_standard_input_is_heard_like_a_file(rate, run, tmp_path, monkeypatch):
    question = write_question(tmp_path / "q.wav", rate=rate)
    from_file = run("ask", "q.wav", "--max_seconds", "0.5", "--json")
    stdin = types.SimpleNamespace(buffer=io.BytesIO(soundfile.read(question, dtype="int16")[0].tobytes()))
    monkeypatch.setattr("sys.stdin", stdin)
    done = run("ask", "-", "--input_rate", rate, "--max_seconds", "0.5", "--json", "--out", "b.wav")
    assert done.code == 0, done.err
    assert json.loads(done.text)["text"] == json.loads(from_file.text)["text"]
    assert samples_of(tmp_path / "b.wav") == samples_of(tmp_path / "answer.wav")


def test_json_is_one_object_per_turn(run, tmp_path):
    for name in ("a", "b"):
        write_question(tmp_path / f"{name}.wav", seed=ord(name))
    done = run("ask", "a.wav", "b.wav", "--json", "--max_seconds", "0.4")
    turns = [json.loads(line) for line in done.text.splitlines()]
    assert [t["question"] for t in turns] == ["a.wav", "b.wav"]
    assert [t["audio"] for t in turns] == ["answer-1.wav", "answer-2.wav"]
    for turn in turns:
        assert turn["task"] == "A1A2" and turn["ended"] == "length" and turn["seconds"] == 0.4
        assert turn["first_audio_ms"] > 0 and turn["real_time_factor"] > 0 and turn["underruns"] >= 0
        assert len(samples_of(tmp_path / turn["audio"])) == 2 * 0.4 * 8000
    keys = "task question text audio seconds first_text_ms first_audio_ms real_time_factor underruns ended warnings error"
    assert set(turns[0]) == set(keys.split())


def test_equal_seeds_repeat_and_others_differ(run, tmp_path):
    def said(*words):
        done = run("ask", "--text", "7 + 5?", "--temperature", "1", "--max_seconds", "0.8", "--json", *words)
        return json.loads(done.text)["text"], samples_of(tmp_path / "answer.wav")

    assert said("--seed", "1") == said("--seed", "1") != said("--seed", "2")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("spoken", [True, False])
def test_chat_turns_share_a_session_and_other_questions_do_not(spoken, run, lm, tmp_path):
    task = "A1A2" if spoken else "T1A2"
    if spoken:
        questions = [str(write_question(tmp_path / f"{n}.wav", seed=n)) for n in range(2)]
        words = ["ask", *questions]
    else:
        questions = ["one", "two"]
        words = ["ask", "--text", *questions]
    words += ["--max_seconds", "0.4", "--temperature", "1"]

    def said():
        return [samples_of(tmp_path / f"answer-{n}.wav") for n in (1, 2)]

    options = {"sampling": Sampling(1.0), "max_seconds": 0.4}
    alone = [pcm16(lm.generate(q, task, **options).audio) for q in questions]
    assert run(*words).code == 0
    assert said() == alone
    assert run(*words, "--chat").code == 0
    with lm.session(**options) as session:
        together = [pcm16(session.ask(q, task).answer().audio) for q in questions]
    assert said() == together and together[0] == alone[0] and together[1] != alone[1]


MIXED = {
    "sound first": (["0.wav", "--chat", "--text", "and twice that?"], ["A1A2", "T1A2"]),
    "text first": (["--text", "what?", "--chat", "0.wav"], ["T1A2", "A1A2"]),
    "in turns": (["0.wav", "--text", "more", "1.wav", "--chat"], ["A1A2", "T1A2", "A1A2"]),
    "written answers": (["0.wav", "--text", "more", "--chat", "--task", "A1T2"], ["A1T2", "T1T2"]),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MIXED)
def test_a_chat_takes_sound_and_text_in_the_order_of_the_command_line(name, run, lm, tmp_path):
    words, tasks = MIXED[name]
    for n in range(2):
        write_question(tmp_path / f"{n}.wav", seed=n)
    done = run("ask", *words, "--max_seconds", "0.4", "--max_tokens", "5", "--json")
    assert done.code == 0, done.err
    turns = [json.loads(line) for line in done.text.splitlines()]
    assert [turn["task"] for turn in turns] == tasks
    with lm.session(max_seconds=0.4, max_tokens=5) as session:
        for number, turn in enumerate(turns, 1):
            question = turn["question"] if turn["task"][0] == "T" else tmp_path / turn["question"]
            answer = session.ask(question, turn["task"]).answer()
            assert turn["text"] == answer.text
            if answer.audio is None:
                assert turn["audio"] is None
                continue
            assert turn["audio"] == f"answer-{number}.wav" and samples_of(tmp_path / turn["audio"]) == pcm16(answer.audio)


def test_a_written_answer_leaves_no_sound(run, tmp_path):
    done = run("ask", "--text", "hi", "--task", "T1T2", "--max_tokens", "5")
    assert done.code == 0
    assert re.search(r"first text \d+ ms, done after \d+ ms\n$", done.text)
    assert list(tmp_path.glob("*.wav")) == []


def test_every_chunk_is_written_before_the_next_is_made(tmp_path, capsys):
    pipe = io.BytesIO()
    seen = []

    def written() -> tuple[int, int, str]:
        part = next(tmp_path.glob(".a.wav.part-*"))
        return part.stat().st_size, len(pipe.getvalue()), capsys.readouterr().out

    def events():
        for n in range(4):
            yield TextDelta(f"word{n} ")
            yield AudioChunk(torch.full((8192,), n / 8))
            seen.append(written())
        yield Ended("end", Timings())

    with Outputs([WavOutput(tmp_path / "a.wav", 8000), PipeOutput(pipe)]) as outputs:
        pieces: list[str] = []
        meter = AnswerMeter(8000)
        ended = follow(events(), meter, outputs, sys.stdout, pieces)
    assert [pipe for _, pipe, _ in seen] == [2 * 8192 * n for n in (1, 2, 3, 4)]
    sizes = [file for file, _, _ in seen]
    assert sizes == sorted(set(sizes)) and sizes[0] > 44  # the file grows with every chunk
    assert [out for _, _, out in seen] == [f"word{n} " for n in range(4)]
    assert ("".join(pieces), ended.reason, meter.sound) == ("word0 word1 word2 word3 ", "end", 4 * 8192 / 8000)
    assert read_audio(tmp_path / "a.wav", 8000).tolist() == [n / 8 for n in range(4) for _ in range(8192)]


def broken_off(error: BaseException, after: int):
    """`Session.ask` whose answer is broken off by an exception after some chunks."""
    real = Session.ask

    def ask(self, *args, **kwargs):
        chunks = 0
        for event in real(self, *args, **kwargs):
            if chunks == after:
                raise error
            chunks += isinstance(event, AudioChunk)
            yield event

    return ask


@pytest.mark.parametrize("way_out", [KeyboardInterrupt(), SystemExit(143)])
def test_ctrl_c_under_json_says_what_was_delivered(way_out, run, lm, tmp_path, monkeypatch, capsysbinary):
    monkeypatch.setattr(Session, "ask", broken_off(way_out, after=3))
    words = ("ask", "--text", "hello", "--max_seconds", "2", "--json")
    if isinstance(way_out, SystemExit):
        with pytest.raises(SystemExit):
            run(*words)
        out = capsysbinary.readouterr().out
    else:
        done = run(*words)
        assert (done.code, done.err) == (130, "interrupted\n")
        out = done.out
    (line,) = out.decode().splitlines()
    turn = json.loads(line)
    assert (turn["ended"], turn["audio"], turn["seconds"], turn["question"]) == ("cancelled", "answer.wav", 0.12, "hello")
    monkeypatch.undo()
    whole = lm.generate("hello", "T1A2", max_seconds=2)
    assert samples_of(tmp_path / "answer.wav") == pcm16(whole.audio[: 3 * 320])
    assert turn["text"] and whole.text.startswith(turn["text"])


def test_ctrl_c_before_any_sound_names_no_file(run, tmp_path, monkeypatch):
    (tmp_path / "answer.wav").write_bytes(b"an older answer")
    monkeypatch.setattr(Session, "ask", broken_off(KeyboardInterrupt(), after=0))
    done = run("ask", "--text", "hello", "--json")
    turn = json.loads(done.text)
    assert (done.code, turn["ended"], turn["audio"], turn["seconds"]) == (130, "cancelled", None, 0)
    assert (tmp_path / "answer.wav").read_bytes() == b"an older answer"


def test_a_name_that_is_no_text_is_asked_written_and_told_in_json(run, tmp_path):
    name = "fr\udce9.wav"
    (tmp_path / name).write_bytes(write_question(tmp_path / "q.wav").read_bytes())
    done = run("ask", name, "--out", "b\udce9.wav", "--max_seconds", "0.08", "--json")
    turn = json.loads(done.text)
    assert done.code == 0 and (turn["question"], turn["audio"]) == (name, "b\udce9.wav")
    assert (tmp_path / "b\udce9.wav").stat().st_size > 44
    plain = run("ask", name, "--out", "b\udce9.wav", "--max_seconds", "0.08")
    assert plain.code == 0 and "b\\udce9.wav: 0.08 s" in plain.text


def test_an_error_on_the_way_leaves_nothing(run, tmp_path, monkeypatch):
    (tmp_path / "answer.wav").write_bytes(b"an older answer")
    monkeypatch.setattr(Session, "ask", broken_off(UserError("the disk is full"), after=3))
    done = run("ask", "--text", "hello", "--max_seconds", "2")
    assert (done.code, done.err) == (2, "error: the disk is full\n")
    assert [p.name for p in tmp_path.iterdir()] == ["answer.wav"]
    assert (tmp_path / "answer.wav").read_bytes() == b"an older answer"


def test_an_answer_that_breaks_is_an_error_and_the_next_is_answered(run, lm, tmp_path, monkeypatch):
    """Its logits are no numbers at the fifth time step."""
    real, asked = Runner.results, []

    def results(self, flush=False):
        found = real(self, flush)
        asked.extend(written.column for _, written in found)
        return [(row, written._replace(broken=len(asked) == 5)) for row, written in found]

    monkeypatch.setattr(Runner, "results", results)
    done = run("ask", "--text", "hello", "again", "--max_seconds", "0.4", "--json")
    broken, whole = (json.loads(line) for line in done.text.splitlines())
    assert done.code == 1 and done.err == f"error: {broken['error']}\n" and "not finite numbers at time step 4" in done.err
    assert (broken["ended"], broken["audio"]) == ("error", None)
    assert (whole["ended"], whole["error"], whole["seconds"]) == ("length", None, 0.4)
    assert [p.name for p in tmp_path.iterdir()] == ["answer-2.wav"]
    asked.clear()
    done = run("ask", "--text", "hello", "--out", "-")
    assert done.code == 1 and "error: the model's logits are not finite" in done.err and "first audio" not in done.err


def test_a_reader_that_goes_away_is_no_traceback(run, monkeypatch):
    def write(self, samples):
        raise BrokenPipeError

    monkeypatch.setattr(PipeOutput, "write", write)
    monkeypatch.setattr("infer.__main__.forget", lambda number: None)
    done = run("ask", "--text", "hello", "--max_seconds", "1", "--out", "-")
    assert done.code == 141 and "Traceback" not in done.err


def test_a_named_pipe_is_read_once_and_is_the_file_that_comes_out_of_it(run, tmp_path):
    question = write_question(tmp_path / "q.wav")
    os.mkfifo(tmp_path / "pipe.wav")
    writer = threading.Thread(target=(tmp_path / "pipe.wav").write_bytes, args=(question.read_bytes(),), daemon=True)
    writer.start()
    words = ["--json", "--max_seconds", "0.4"]
    piped = run("ask", "pipe.wav", "--out", "a.wav", *words)
    assert piped.code == 0, piped.err
    writer.join(30)
    assert run("ask", "q.wav", "--out", "b.wav", *words).code == 0
    assert samples_of(tmp_path / "a.wav") == samples_of(tmp_path / "b.wav")
