"""The turn head over a question that is listened to: what it says is what a `TurnListener` says of the same sound."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from omni.generate.listening import EndRule, TurnFrames, TurnListener
from omni.generate.question import Listening
from omni.generate.speech_lm import SpeechLM
from omni.model.speech_model import SpeechModel
from tests.close import assert_near
from tests.engine.test_listen_process import Here
from tests.generate.listening_toys import TALK, listener, pieces, sound, wait_until_heard
from tests.generate.session_toys import same


@pytest.fixture(scope="module")
def lm() -> Iterator[SpeechLM]:
    plain = listener()
    torch.manual_seed(3)
    model = SpeechModel(replace(plain.model.config, turn=True)).eval()
    yield SpeechLM(model, plain.tokenizer, plain.codec)


def told(lm: SpeechLM, listening: Listening, frames: int) -> Tensor:
    """The probabilities of so many frames, once they are known."""
    end = time.monotonic() + 20
    while len(listening.turn.known) < frames:  # type: ignore[union-attr]
        assert time.monotonic() < end
        time.sleep(0.001)
    wait_until_heard(lm)
    time.sleep(0.02)
    return listening.turn.known  # type: ignore[union-attr]


def of_the_whole(lm: SpeechLM, samples: Tensor) -> Tensor:
    listener = TurnListener.of(lm.model)
    return listener.probabilities(listener.encoder.stream().push(samples))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", ["here", "another process"])
@pytest.mark.parametrize("seconds", [0.7, 1.6, 4.1])
def test_it_says_the_same_as_over_the_whole_sound(lm: SpeechLM, where: str, seconds: float) -> None:
    question = sound(seconds, 5)
    wanted = of_the_whole(lm, question)
    with (lm if where == "here" else Here(lm)).session(**TALK) as session:
        listening = session.listen(turn=True)
        for piece in pieces(question):
            listening.push(piece)
        assert_near(told(lm, listening, len(wanted)), wanted, 1e-5)
        assert listening.turn.rate == 50  # type: ignore[union-attr]
        session.ask(listening).answer()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", ["here", "another process"])
@pytest.mark.parametrize("rate", [16_000, 24_000])
def test_what_is_peeked_at_is_judged_and_is_no_part_of_the_question(lm: SpeechLM, where: str, rate: int) -> None:
    speech, silence = sound(1.0, 1), 0.01 * sound(1.5, 2)
    if rate == 24_000:
        speech, silence = speech.repeat(2)[:24_000], silence.repeat(2)[:36_000]
    with lm.session(**TALK) as other:
        wanted = other.ask(speech, sample_rate=rate).answer()
    with (lm if where == "here" else Here(lm)).session(**TALK) as session:
        listening = session.listen(sample_rate=rate, turn=True)
        listening.push(speech)
        for piece in pieces(silence):
            listening.peek(piece)
        found = told(lm, listening, 112)
        (open_,) = lm.engine.requests.listening()
        heard = torch.cat([open_.stream.sound, *open_.stream._peeked])
        assert_near(found, of_the_whole(lm, heard), 1e-5)
        same(session.ask(listening).answer(), wanted)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("push", [16_000, 5_000, 24_000])
def test_peeked_sound_that_is_pushed_is_encoded_once(lm: SpeechLM, push: int, monkeypatch: pytest.MonkeyPatch) -> None:
    speech, pause = sound(1.0, 1), sound(1.0, 2)
    more = torch.cat([pause, sound(0.9, 3)])
    with lm.session(**TALK) as other:
        wanted = other.ask(torch.cat([speech, more])).answer()
    judged = of_the_whole(lm, torch.cat([speech, more]))
    with lm.session(**TALK) as session:
        listening = session.listen(turn=True)
        listening.push(speech)
        listening.peek(pause)
        told(lm, listening, 96)
        encoded, stream = [], type(lm.model.encoder.stream())
        chunk = stream._chunk
        monkeypatch.setattr(stream, "_chunk", lambda self, sound: encoded.append(len(sound)) or chunk(self, sound))
        for part in more.split(push):
            listening.push(part)
        assert_near(told(lm, listening, 144), judged, 1e-5)
        assert sum(encoded) <= 16_000 + 2 * 2560 or push == 5_000  # a part of the peeked chunks is encoded again
        same(session.ask(listening).answer(), wanted)


def test_other_sound_than_was_peeked_at(lm: SpeechLM) -> None:
    speech, more = sound(1.0, 1), sound(1.0, 3)
    with lm.session(**TALK) as session, lm.session(**TALK) as other:
        listening = session.listen(turn=True)
        listening.push(speech)
        listening.peek(sound(1.0, 2))
        told(lm, listening, 96)
        listening.push(more)
        whole = torch.cat([speech, more])
        assert_near(told(lm, listening, 96)[:96], of_the_whole(lm, whole)[:96], 1e-5)
        same(session.ask(listening).answer(), other.ask(whole).answer())


def test_what_is_too_long_is_heard_no_further(lm: SpeechLM) -> None:
    model = SpeechModel(replace(lm.model.config, encoder=replace(lm.model.config.encoder, long_audio="refuse")))
    model.load_state_dict(lm.model.state_dict())
    short = SpeechLM(model.eval(), lm.tokenizer, lm.codec)
    with short.session(**TALK) as session, short.session(**TALK) as other:
        listening = session.listen(turn=True)
        listening.push(sound(2.0, 1))
        for piece in sound(2.0, 2).split(4_000):
            listening.peek(piece)
        told(short, listening, 144)
        same(session.ask(listening).answer(), other.ask(sound(2.0, 1)).answer())


def test_without_a_turn_head_nothing_is_peeked_at() -> None:
    plain = listener()
    with plain.session(**TALK) as session, plain.session(**TALK) as other:
        listening = session.listen(turn=True)
        assert listening.turn is None
        listening.push(sound(1.0))
        listening.peek(sound(1.0))
        same(session.ask(listening).answer(), other.ask(sound(1.0)).answer())


def test_a_frame_speaks_for_its_time_however_late_it_comes() -> None:
    rule, frames = EndRule(0.5, 2), TurnFrames(25.0)
    ends = torch.zeros(50, 2)
    ends[20:30, 1] = ends[40:, 1] = 1.0  # after 0.8 s, in a pause, and after 1.6 s
    assert not frames.ended(1.0, 0.8, rule)  # nothing is known yet
    frames.put(0, ends[:28])
    assert [frames.ended(t, 0.8, rule) for t in (0.5, 0.84, 0.88, 1.0, 1.1)] == [False, False, True, True, True]
    assert not frames.ended(1.6, 1.5, rule)  # somebody spoke since
    frames.put(28, ends[28:])
    assert [frames.ended(t, 1.5, rule) for t in (1.6, 1.7, 9.0)] == [False, True, True]
    frames.put(40, torch.zeros(5, 2))
    assert not frames.ended(2.0, 1.5, rule) and len(frames.known) == 45
