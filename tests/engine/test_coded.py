"""Where the listeners' process decodes, they get and remember what they do where the engine's process does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from omni.engine.answer import CodedSound
from omni.engine.process import EngineProcess, _with_sound
from omni.engine.sound import SoundDecoder
from omni.generate.results import AudioChunk, Ended, TextDelta
from omni.generate.speech_lm import SpeechLM
from tests.engine.test_process import LONG, play_alike, told
from tests.generate.session_toys import TALKATIVE


@pytest.fixture(scope="module")
def lm(saved: Path) -> SpeechLM:
    return SpeechLM.from_pretrained(saved.with_name("portable"))


@pytest.fixture(scope="module")
def engine(saved: Path) -> Iterator[EngineProcess]:
    with EngineProcess(saved.with_name("portable"), threads=1) as engine:
        yield engine


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_two_conversations_get_and_remember_the_same(lm: SpeechLM, engine: EngineProcess, seed: int) -> None:
    before = engine.decoding
    play_alike(lm, engine, seed)
    assert engine.decoding > before


@pytest.mark.long
def test_live_listeners_and_limits_of_silence(lm: SpeechLM, engine: EngineProcess) -> None:
    options: dict[str, Any] = LONG | {"max_seconds": 2.0}
    with lm.session(**options) as session:
        wanted, past = list(session.ask("on", "T1A2")), told(session)
    with engine.session(pace="live", **options) as session:
        assert sound_of(list(session.ask("on", "T1A2"))) == sound_of(wanted)
        assert told(session) == past
    before = engine.decoding
    for place in (lm, engine):  # the engine listens for the silence, and so it decodes
        with place.session(sampling=TALKATIVE, max_silence=0.2, max_seconds=4.0) as session:
            wanted.append(session.ask("on", "T1A2").answer().ended)
    assert wanted[-2] == wanted[-1] and engine.decoding == before


def sound_of(events: list[Any]) -> list[float]:
    sounds: list[Tensor] = [event.samples for event in events if isinstance(event, AudioChunk)]
    return torch.cat(sounds).tolist()  # type: ignore[no-any-return]


def ended(events: list[Any]) -> Ended:
    assert isinstance(events[-1], Ended)
    return events[-1]


@pytest.mark.long
def test_what_cannot_be_decoded_ends_one_answer(lm: SpeechLM, engine: EngineProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.engine.echo import PortableStream

    real, bad = PortableStream._push, list[PortableStream]()

    def push(self: PortableStream, codes: Tensor) -> Tensor:
        if not bad:
            bad.append(self)
        if self is bad[0]:
            raise ValueError("no such code")
        return real(self, codes)

    options: dict[str, Any] = LONG | {"max_seconds": 2.0}
    with lm.session(**options) as session:
        wanted = list(session.ask("on", "T1A2"))
    monkeypatch.setattr(PortableStream, "_push", push)
    with engine.session(**options) as one, engine.session(**options) as two:
        answers = one.ask("on", "T1A2"), two.ask("on", "T1A2")
        events = [list(answer) for answer in answers]
        fails = int(ended(events[1]).reason == "error")  # that of the stream which was decoded first
        assert ended(events[fails]).reason == "error"
        assert "codec portable cannot decode the answer (codec portable failed with ValueError: no such code)" in str(
            ended(events[fails]).error
        )
        failed, other = ((one, two), (two, one))[fails]
        assert sound_of(events[1 - fails]) == sound_of(wanted) and len(other.turns) == 1 and failed.turns == ()
        assert sound_of(list(failed.ask("on", "T1A2"))) == sound_of(wanted)


def test_decoders_go_with_their_answers(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.engine.echo import load_portable

    codec = load_portable(None, torch.device("cpu"))
    decoder, frame = SoundDecoder[int](codec), [1] * len(codec.codebook_sizes)
    whole = codec.decode(torch.tensor([frame] * 3).T)
    sounds = decoder.push({1: [frame] * 3, 2: [frame]})
    assert torch.equal(sounds[1], whole) and len(decoder._batch) == 2  # type: ignore[arg-type]
    events: list[Any] = [TextDelta("a"), CodedSound([frame, frame], 0.0, 0.08), CodedSound([frame], 0.08, 0.12)]
    _, first, last = _with_sound(events, whole, codec.frame_samples)
    assert torch.equal(torch.cat([first.samples, last.samples]), whole) and (last.start, last.end) == (0.08, 0.12)
    assert _with_sound(events, None, codec.frame_samples) == [TextDelta("a")]
    decoder.keep({1})
    assert len(decoder._batch) == 1
    decoder.close(1)
    assert len(decoder._batch) == 0
    monkeypatch.setattr(decoder._batch, "push", lambda streams, codes: 1 / 0)
    assert isinstance(decoder.push({4: [frame]})[4], ZeroDivisionError)
