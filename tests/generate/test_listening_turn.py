"""Where a model hears a question end: over a question that is listened to, over pieces, from a folder, and once learned."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from omni.checkpoint.folder import load_folder, save_folder
from omni.convert.omni_folder import quantize_folder
from omni.encoder.base import collate
from omni.encoder.whisper_config import WhisperConfig
from omni.generate.listening import END, VOICE, EndRule, TurnFrames, TurnListener, ended
from omni.generate.question import Listening
from omni.generate.speech_lm import SpeechLM
from omni.model.speech_model import SpeechModel
from tests.close import assert_near
from tests.engine.test_listen_process import Here
from tests.generate.listening_toys import TALK, listener, pieces, sound, wait_until_heard
from tests.generate.session_toys import same
from tests.soon import soon
from tests.train.data.toys import MODELS, TOKENIZER
from train.data.augment import speech
from train.data.batching.examples import turn_labels
from train.objective.objective import turn_loss


@pytest.fixture(scope="module")
def lm() -> Iterator[SpeechLM]:
    plain = listener()
    torch.manual_seed(3)
    model = SpeechModel(replace(plain.model.config, turn=True)).eval()
    yield SpeechLM(model, plain.tokenizer, plain.codec)


def told(lm: SpeechLM, listening: Listening, frames: int) -> Tensor:
    """The probabilities of so many frames, once they are known."""
    assert soon(lambda: len(listening.turn.known) >= frames)  # type: ignore[union-attr]
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
        heard = torch.cat([open_.stream.sound, open_.stream._peeked])
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


ENCODER = WhisperConfig(width=32, heads=2, layers=1, window_seconds=4.0, mode="chunked", hop=320, chunk_ms=160)
CONFIG = replace(MODELS["codec2"], encoder=ENCODER, turn=True, codec="codec2")


def model_of(seed: int = 0) -> SpeechModel:
    torch.manual_seed(seed)
    return SpeechModel(CONFIG).eval()


def tone(hertz: float, seconds: float) -> Tensor:
    return 0.3 * torch.sin(2 * torch.pi * hertz * torch.arange(round(16_000 * seconds)) / 16_000)


def question(pause: float, before: float = 0.2, after: float = 1.0) -> Tensor:
    """A low tone, after which a high one must come, which is the end."""
    silences = [torch.zeros(round(16_000 * seconds)) for seconds in (before, pause, after)]
    return torch.cat([silences[0], tone(300, 0.4), silences[1], tone(1500, 0.4), silences[2]])


def in_pieces(listener: TurnListener, sound: Tensor, most: int, seed: int) -> Tensor:
    draw, stream, found = random.Random(seed), listener.encoder.stream(), []
    while len(sound):
        size = draw.randrange(most)
        found.append(listener.probabilities(stream.push(sound[:size])))
        sound = sound[size:]
    return torch.cat([*found, listener.probabilities(stream.finish())])


def test_any_split_gives_the_same_decisions_and_those_of_the_whole() -> None:
    model, sound = model_of(), question(0.5)
    listener = TurnListener.of(model)
    once = in_pieces(listener, sound, 20_000, 0)
    for most in (500, 7000):
        assert in_pieces(listener, sound, most, most).equal(once)
    whole = model.turn_head(model.encoder.encode([sound])[0]).sigmoid()
    torch.testing.assert_close(once, whole, rtol=1e-5, atol=1e-5)
    for threshold in (0.3, 0.5):
        assert ended(once, EndRule(threshold)).equal(ended(whole, EndRule(threshold)))


def test_a_turn_has_ended_after_so_many_sure_frames_in_a_row() -> None:
    sure = torch.tensor([0.9, 0.1, 0.9, 0.8, 0.79, 0.9, 0.9, 0.9])
    both = torch.stack([torch.zeros(8), sure], dim=1)
    assert ended(both, EndRule(0.8, 1)).tolist() == (sure >= 0.8).tolist()
    assert ended(both, EndRule(0.8, 2)).int().tolist() == [0, 0, 0, 1, 0, 0, 1, 1]
    assert ended(both, EndRule(0.8, 9)).int().tolist() == [0] * 8
    assert len(ended(both[:0], EndRule(0.8, 2))) == 0


def test_a_folder_keeps_the_head_in_full_precision_and_in_int8(tmp_path: Path) -> None:
    model, sound = model_of(), question(0.3)
    wanted = in_pieces(TurnListener.of(model), sound, 9000, 1)
    save_folder(tmp_path / "model", CONFIG, model.state_dict(), TOKENIZER)
    loaded = load_folder(tmp_path / "model")
    assert loaded.config == CONFIG and loaded.model.turn_head is not None
    listener = TurnListener.from_folder(tmp_path / "model")
    assert listener is not None and in_pieces(listener, sound, 9000, 1).equal(wanted)
    quantize_folder(tmp_path / "model", tmp_path / "int8")
    small = TurnListener.from_folder(tmp_path / "int8")
    assert small is not None
    torch.testing.assert_close(in_pieces(small, sound, 9000, 1), wanted, rtol=0, atol=0.05)


@pytest.mark.long
def test_a_head_that_has_learned_it_ends_the_turn_after_the_end_and_not_in_the_pause() -> None:
    model = model_of()
    model.train()
    draw = random.Random(0)
    optimizer = torch.optim.AdamW([*model.encoder.parameters(), *model.turn_head.parameters()], lr=6e-3)
    for _ in range(45):
        sounds = [question(draw.uniform(0.2, 1.0), draw.uniform(0, 0.4), draw.uniform(0.2, 0.8)) for _ in range(4)]
        features = [ENCODER.features(sound) for sound in sounds]
        frames = [ENCODER.clip_frames(len(sound)) for sound in sounds]
        labels = torch.cat([turn_labels(speech(mel), n) for mel, n in zip(features, frames, strict=True)])
        loss = turn_loss(model.turn_head(model.encoder.run(*collate(features), frames)), labels) / (labels >= 0).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    listener = TurnListener.of(model)
    for pause in (0.4, 0.7, 0.9):
        found = in_pieces(listener, question(pause), 3000, 0)
        places = ended(found, EndRule(0.6, 2)).nonzero().flatten() / ENCODER.frames_per_second
        end = 0.2 + 0.4 + pause + 0.4
        assert end <= float(places[0]) <= end + 0.35
        voice = found[:, VOICE] > 0.5
        assert voice[8:14].all() and not voice[:3].any() and found[-1, END] > 0.9
