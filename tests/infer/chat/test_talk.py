"""Whole conversations over a scripted microphone: what was asked, what was heard, and what stays in the history."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from infer.options import on_one_line
from infer.pcm import Resampler, encode
from omni.checkpoint.folder import save_folder
from omni.generate.answer_stream import AnswerStream
from omni.generate.results import Ended, Event, Timings
from omni.generate.runner import Runner
from omni.generate.speech_lm import SpeechLM
from omni.tasks import Turn
from omni.text import Tokenizer
from tests.infer.chat.conftest import Talks
from tests.infer.chat.fake_sound import RATE, FakeSound, Wait
from tests.infer.conftest import turn_model

SHORT = ("--max_seconds", "0.8")


def question(sound: FakeSound, seconds: float = 0.6) -> Iterator[Any]:
    """Speech, and quiet until it is taken for a question, at most 0.7 s."""
    before = sound.questions
    yield from sound.say(seconds)
    for block in sound.quiet(0.7):
        if sound.questions > before:
            return
        yield block


def two_questions(sound: FakeSound) -> Iterator[Any]:
    yield from sound.quiet(0.5)
    yield from question(sound)
    yield from sound.until_played()
    yield from sound.quiet(0.3)
    yield from question(sound, 0.4)
    yield from sound.until_played()


def barge_in(sound: FakeSound) -> Iterator[Any]:
    yield from sound.quiet(0.5)
    yield from question(sound)
    yield Wait()
    yield from sound.until_heard(0.33)
    yield from question(sound, 0.5)
    yield from sound.until_played()


def place_of(piece: np.ndarray, whole: np.ndarray) -> int:
    """Where a piece begins in a sound; -1 where it is not in it."""
    return whole.tobytes().find(piece.tobytes()) // 2


def played(sound: torch.Tensor) -> np.ndarray:
    """Sound of the codec [S], as the session sends it."""
    rate = Resampler(8000, RATE)
    return np.frombuffer(encode(np.concatenate([rate.push(sound.numpy()), rate.finish()]), "audio/pcm"), np.int16)


def read(file: Path) -> np.ndarray:
    return np.asarray(soundfile.read(file, dtype="int16")[0])


def history(lm: SpeechLM, folder: Path) -> tuple[Turn, ...]:
    """The turns of a conversation that was kept."""
    with lm.session(history=folder / "conversation.safetensors") as session:
        return session.turns


def test_questions_are_asked_bit_for_bit_and_answers_played_whole(talk: Talks, lm: SpeechLM, tmp_path: Path) -> None:
    talked = talk(two_questions, "--save", "kept", *SHORT)
    assert talked.done.code == 0, talked.done.err
    first, second = (place_of(asked, talked.sound.input) for asked in talked.asked)
    assert abs(first / RATE - 0.4) < 0.05 and abs(len(talked.asked[0]) / RATE - 0.8) < 0.07
    assert second > first + len(talked.asked[0]) and abs(len(talked.asked[1]) / RATE - 0.6) < 0.07
    with lm.session(max_seconds=0.8) as session:
        answers = [session.ask(asked, sample_rate=RATE).answer() for asked in talked.asked]
        turns = session.turns
    for number, (answer, heard) in enumerate(zip(answers, talked.sound.silenced, strict=False), 1):
        wanted = played(answer.audio)
        assert np.array_equal(heard[: len(wanted)], wanted) and not heard[len(wanted) :].any()
        assert np.array_equal(read(tmp_path / f"kept/answer-{number}.wav"), wanted)
        assert np.array_equal(read(tmp_path / f"kept/question-{number}.wav"), talked.asked[number - 1])
        assert f"model: {answer.text} (0.8 s, first audio" in talked.done.text
    assert talked.cut == [] and repr(history(lm, tmp_path / "kept")) == repr(turns)
    states = ["listening", "hearing you", "thinking", "speaking"]
    shown = [line for line in talked.done.err.split("\n") if line.startswith("[")]
    assert shown == [f"[{state}]" for state in ("loading the model", "warming up", *states, *states, "listening")]


def test_speech_stops_an_answer_and_the_history_keeps_what_was_heard(talk: Talks, lm: SpeechLM, tmp_path: Path) -> None:
    talked = talk(barge_in, "--headphones", "--save", "kept", *SHORT)
    assert talked.done.code == 0, talked.done.err
    heard = talked.sound.silenced[0]
    frame = RATE / lm.codec.frame_rate
    assert 0.33 * RATE <= len(heard) < 0.55 * RATE  # two frames of speech, in blocks of 20 ms
    assert abs(talked.cut[0] * RATE / 1000 - len(heard)) <= RATE / 1000
    turns = history(lm, tmp_path / "kept")
    assert turns[0].codes.shape[1] == len(heard) // frame and turns[1].codes.shape[1] * frame == 0.8 * RATE
    assert abs(len(read(tmp_path / "kept/answer-1.wav")) - len(heard)) <= 1
    whole = lm.generate(talked.asked[0], sample_rate=RATE, max_seconds=0.8)
    assert np.array_equal(heard, played(whole.audio)[: len(heard)])
    assert "(interrupted after 0." in talked.done.text and whole.text not in talked.done.text
    # The question that interrupts begins with its padding, while the answer still played, and holds none of the first.
    first, second = (place_of(asked, talked.sound.input) for asked in talked.asked)
    assert first + len(talked.asked[0]) <= second and abs(len(talked.asked[1]) / RATE - 0.7) < 0.07


def test_without_headphones_nobody_is_heard_while_an_answer_plays(talk: Talks) -> None:
    def script(sound: FakeSound) -> Iterator[Any]:
        yield from question(sound)
        yield Wait()
        yield from sound.until_heard(0.2)
        yield from sound.say(0.4)
        yield from sound.quiet(0.6)
        told.append(sound.samples)
        yield from question(sound)
        yield from sound.until_played()

    told: list[int] = []
    talked = talk(script, *SHORT)
    assert talked.done.code == 0 and talked.cut == []
    assert len(talked.asked) == 2 and "interrupted" not in talked.done.text
    assert abs(place_of(talked.asked[1], talked.sound.input) - (told[0] - 0.1 * RATE)) < 0.04 * RATE


def test_speech_before_the_first_sound_takes_the_place_of_the_question(talk: Talks, monkeypatch: Any) -> None:
    both, step = threading.Event(), Runner.step

    def script(sound: FakeSound) -> Iterator[Any]:
        yield from sound.quiet(0.3)
        yield from question(sound)
        yield from question(sound)
        both.set()
        yield from sound.until_played()

    def late(self: Runner, *args: Any, **more: Any) -> Any:
        both.wait(0.5)  # not for ever: the session may wait for a step's end before it hears on
        return step(self, *args, **more)

    monkeypatch.setattr("infer.chat.chat.warm_up", lambda lm: None)
    monkeypatch.setattr(Runner, "step", late)
    talked = talk(script, *SHORT)
    assert talked.done.code == 0 and len(talked.asked) == 2
    assert talked.done.text.count("(interrupted)") == 1 and talked.done.text.count("first audio") == 1


def test_a_barge_in_while_the_answer_is_still_made(talk: Talks, lm: SpeechLM, tmp_path: Path) -> None:
    def script(sound: FakeSound) -> Iterator[Any]:
        yield from question(sound)
        yield Wait(12)
        yield from sound.until_heard(0.1)
        yield from question(sound, 0.5)
        yield from sound.until_played()

    talked = talk(script, "--headphones", "--save", "kept", "--max_seconds", "2")
    assert talked.done.code == 0, talked.done.err
    kept = history(lm, tmp_path / "kept")[0].codes.shape[1]
    assert kept <= talked.cut[0] / 1000 * lm.codec.frame_rate < kept + 1


def test_enter_begins_and_ends_a_pressed_question_and_stops_an_answer(talk: Talks) -> None:
    bounds: list[int] = []

    def script(sound: FakeSound) -> Iterator[Any]:
        def press() -> Iterator[Any]:
            bounds.append(sound.samples)
            yield "enter"

        yield from sound.say(0.5)  # nobody has pressed
        yield from press()
        yield from sound.quiet(0.4)
        yield from press()
        yield Wait()
        yield from sound.until_heard(0.3)
        yield from press()
        yield from sound.quiet(0.2)
        yield from press()
        yield from sound.until_played()
        yield "enter"
        yield "enter"  # before a block came

    talked = talk(script, "--turn_detection", "none", *SHORT)
    assert talked.done.code == 0, talked.done.err
    whole = talked.sound.input
    assert len(talked.asked) == 2
    assert np.array_equal(talked.asked[0], whole[bounds[0] : bounds[1]])
    assert np.array_equal(talked.asked[1], whole[bounds[2] : bounds[3]])
    assert len(talked.cut) == 1 and 280 <= talked.cut[0] <= 340


def test_ctrl_c_stops_the_answer_and_twice_leaves_with_what_was_heard(talk: Talks, lm: SpeechLM, tmp_path: Path) -> None:
    def script(sound: FakeSound) -> Iterator[Any]:
        yield from question(sound)
        yield Wait()
        yield from sound.until_heard(0.2)
        signal.raise_signal(signal.SIGINT)
        yield from sound.quiet(0.1)
        signal.raise_signal(signal.SIGINT)
        yield from sound.quiet(0.1)

    signal.signal(signal.SIGINT, before := signal.default_int_handler)  # a shell's background ignores it
    talked = talk(script, "--save", "kept", *SHORT)
    assert talked.done.code == 130 and talked.done.err.endswith("interrupted\n")
    assert signal.getsignal(signal.SIGINT) is before
    assert "(stopped after 0.2 s)" in talked.done.text and "Ctrl-C again, or Ctrl-D, leaves" in talked.done.err
    assert history(lm, tmp_path / "kept")[0].codes.shape[1] == 0.2 * 8000 // (8000 / lm.codec.frame_rate)
    assert talked.sound.streams["input"].calls[-2:] == talked.sound.streams["output"].calls[-2:] == ["abort", "close"]


def test_leaving_drops_the_question_under_way(talk: Talks, tmp_path: Path) -> None:
    def script(sound: FakeSound) -> Iterator[Any]:
        yield from sound.quiet(0.3)
        yield from sound.say(0.5)
        yield "end"

    talked = talk(script, "--save", "kept")
    assert talked.done.code == 0 and len(talked.asked) == 0 and list((tmp_path / "kept").iterdir()) == []


def test_a_transcript_is_shown_where_it_is_asked_for(talk: Talks, lm: SpeechLM, monkeypatch: Any) -> None:
    monkeypatch.setattr("infer.serve.realtime.hearing.TRANSCRIPT_TOKENS", 8)
    talked = talk(two_questions, "--transcribe", *SHORT)
    for asked in talked.asked:
        text = lm.generate(asked, "A1T1", sample_rate=RATE, max_tokens=8).text.strip()
        assert f"you: {on_one_line(text)}\n" in talked.done.text


def test_an_answer_that_breaks_is_told_and_the_talk_goes_on(talk: Talks, monkeypatch: Any) -> None:
    following, count = AnswerStream.__anext__, 0

    async def broken(self: AnswerStream) -> Event:
        nonlocal count
        event = await following(self)
        count += isinstance(event, Ended)
        if isinstance(event, Ended) and count == 1:
            return Ended("error", Timings(), "the logits are not finite; load the model in float32")
        return event

    monkeypatch.setattr(AnswerStream, "__anext__", broken)
    talked = talk(two_questions, *SHORT)
    assert talked.done.code == 1 and "error: the logits are not finite; use --dtype float32" in talked.done.err
    assert talked.done.text.count("(broken off)") == 1 and talked.done.text.count("first audio") == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["input", "output"])
def test_a_device_that_goes_away_is_named_with_those_that_are_left(talk: Talks, kind: str, tmp_path: Path) -> None:
    def script(sound: FakeSound) -> Iterator[Any]:
        yield from question(sound)
        yield Wait()
        yield from sound.until_heard(0.2)
        sound.streams[kind].unplug()
        yield from sound.quiet(0.1)

    talked = talk(script, "--save", "kept", *SHORT)
    name = {"input": "microphone 'Built-in Microphone' (0)", "output": "loudspeaker 'Built-in Speakers' (1)"}[kind]
    assert talked.done.code == 2 and f"error: the {name} is gone" in talked.done.err
    assert f"--device_{kind.removesuffix('put')}: besides it there are 'USB Headset' (2)" in talked.done.err
    assert (tmp_path / "kept/conversation.safetensors").exists() and (tmp_path / "kept/question-1.wav").exists()


def test_other_rates_and_two_channels_are_converted(talk: Talks, lm: SpeechLM) -> None:
    sound = FakeSound()
    sound.takes = {"input": ((48_000,), (2,)), "output": ((48_000,), (2,))}
    sound.script = iter([*sound.quiet(0.5), *sound.say(1.2), *sound.quiet(1.4), Wait()])  # at twice the pace
    talked = talk(None, *SHORT, sound=sound)
    assert talked.done.code == 0, talked.done.err
    forms = [(RATE, 1), (48_000, 1), (RATE, 2), (48_000, 2)]
    assert sound.opened == [(kind, number, *form) for kind, number in (("input", 0), ("output", 1)) for form in forms]
    assert len(talked.asked) == 1 and abs(len(talked.asked[0]) / RATE - 0.8) < 0.07


def test_a_kept_question_has_the_same_answer_by_ask(talk: Talks, run: Any, tmp_path: Path) -> None:
    def script(sound: FakeSound) -> Iterator[Any]:
        yield from question(sound)
        yield from sound.until_played()

    assert talk(script, "--save", "kept", *SHORT).done.code == 0
    assert run("ask", "kept/question-1.wav", "--out", "a.wav", *SHORT).code == 0
    answer = played(torch.from_numpy(soundfile.read(tmp_path / "a.wav", dtype="float32")[0]))
    assert np.abs(answer.astype(int) - read(tmp_path / "kept/answer-1.wav")).max() <= 2  # a file's samples were rounded


@pytest.fixture
def judging(tmp_path: Path) -> Path:
    """A model whose turn head finds the end in every frame."""
    model = turn_model(9.0, 9.0)
    save_folder(tmp_path / "judging", model.config, model.state_dict(), Tokenizer.bytes())
    return tmp_path / "judging"


def hesitant(sound: FakeSound) -> Iterator[Any]:
    """A question with a pause of 0.45 s, and 0.7 s of silence; slowly, so that it is heard while it comes."""
    for block in (*sound.quiet(0.5), *sound.say(0.4), *sound.quiet(0.45), *sound.say(0.4), *sound.quiet(0.7)):
        yield block
        time.sleep(0.004)


@pytest.mark.long
def test_the_models_turn_head_ends_questions_where_it_has_one(talk: Talks, judging: Path) -> None:
    def asked(*words: str) -> list[float]:
        talked = talk(hesitant, "--headphones", "--model", judging, *words, *SHORT)
        assert talked.done.code == 0, talked.done.err
        for piece in talked.asked:
            assert place_of(piece, talked.sound.input) >= 0
        return [len(piece) / RATE for piece in talked.asked]

    assert asked()[0] == pytest.approx(0.6, abs=0.1)  # in the pause; what follows is no interruption, once an answer began
    high = '{"type": "semantic_vad", "eagerness": "high"}'
    assert asked("--turn_detection", high)[0] == pytest.approx(0.6, abs=0.1)
    assert asked("--turn_detection", "server_vad") == pytest.approx([1.45], abs=0.1)


def test_a_question_longer_than_the_model_takes_is_cut_and_told(talk: Talks, monkeypatch: Any) -> None:
    for module in ("infer.chat.chat", "infer.serve.realtime.state"):
        monkeypatch.setattr(f"{module}.longest", lambda config: 1.5)

    def script(sound: FakeSound) -> Iterator[Any]:
        yield from sound.quiet(0.5)
        yield from question(sound, 1.4)
        yield from sound.until_played()

    talked = talk(script, *SHORT)
    assert 0.9 < len(talked.asked[0]) / RATE < 1.2 and "warning: the question was cut after 1." in talked.done.err


@pytest.mark.parametrize(("longest", "said", "asked"), [(1.5, 1.2, 1.0), (math.inf, 0.5, 0.5)], ids=["cut", "as of a server"])
def test_a_pressed_question_is_cut_at_the_longest_where_it_is_known(
    talk: Talks, longest: float, said: float, asked: float, monkeypatch: Any
) -> None:
    def script(sound: FakeSound) -> Iterator[Any]:
        yield "enter"
        yield from sound.say(said)
        if longest == math.inf:
            yield "enter"
        yield from sound.until_played()

    monkeypatch.setattr("infer.chat.chat.longest", lambda config: longest)
    talked = talk(script, "--turn_detection", "none", *SHORT)
    assert talked.done.code == 0 and len(talked.asked[0]) == asked * RATE
    assert ("warning: the question was cut after 1.0 s" in talked.done.err) == (said > asked)


def test_a_question_that_is_hardly_one_is_doubted(talk: Talks) -> None:
    def script(sound: FakeSound) -> Iterator[Any]:
        yield "enter"
        yield from sound.quiet(0.3, 0.0005)
        yield "enter"
        yield from sound.until_played()

    assert "is silent: its loudest 100 ms reach" in talk(script, "--turn_detection", "none", *SHORT).done.err
