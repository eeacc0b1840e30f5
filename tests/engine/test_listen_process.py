"""Questions that are heard while they come, of sessions in another process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from omni.checkpoint.folder import save_folder
from omni.engine.child import Child, pack
from omni.engine.process import EngineProcess, PipeLink
from omni.errors import UserError
from omni.generate.session import Session, Sessions
from omni.generate.speech_lm import SpeechLM
from omni.text import Tokenizer
from tests.generate.conftest import LAYOUTS, make_model
from tests.generate.listening_toys import CHUNK, ENCODER, QUESTIONS, TALK, heard, left, listener, pieces, sound
from tests.generate.session_toys import answered, same

pytestmark = pytest.mark.long

__all__ = ["left"]


@pytest.fixture(scope="module")
def folder(saved: Path) -> Path:
    place = saved.with_name("listening")
    model = make_model(LAYOUTS["pad"], context=2000, encoder=ENCODER)
    save_folder(place, replace(model.config, codec="echo"), model.state_dict(), Tokenizer.bytes())
    return place


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[EngineProcess]:
    with EngineProcess(folder, threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def lm(folder: Path) -> SpeechLM:
    return SpeechLM.from_pretrained(folder)


@pytest.mark.parametrize("options", [{}, {"text_assist": True}, {"context": 200, "overflow": "forget"}])
def test_heard_in_the_other_process_equals_the_whole(lm: SpeechLM, engine: EngineProcess, options: dict[str, Any]) -> None:
    with engine.session(**TALK | options) as remote, lm.session(**TALK | options) as local:
        for turn in range(8):
            question, task = QUESTIONS[turn % len(QUESTIONS)]
            same(heard(lm, remote, question, task, wait=False), local.ask(question, task).answer())  # type: ignore[arg-type]
        assert [t.text for t in remote.turns] == [t.text for t in local.turns]
        for one, other in zip(remote.history, local.history, strict=True):
            assert (one.role, one.text, one.tokens) == (other.role, other.text, other.tokens)


def test_iterators_are_heard_there(lm: SpeechLM, engine: EngineProcess) -> None:
    question = sound(1.5, 7)

    async def coming() -> AsyncIterator[Tensor]:
        for piece in pieces(question):
            await asyncio.sleep(0)
            yield piece

    async def run() -> Any:
        async with engine.session(**TALK) as session:
            return await answered(session, coming())

    with lm.session(**TALK) as local:
        wanted = local.ask(question).answer()
    with engine.session(**TALK) as session:
        same(session.ask(pieces(question)).answer(), wanted)
    same(asyncio.run(run()), wanted)
    with engine.session(**TALK) as session:
        same(session.ask(iter(question.split(160)), sample_rate=16_000).answer(), wanted)


def test_a_sound_that_is_dropped_or_cancelled_leaves_nothing_there(lm: SpeechLM, engine: EngineProcess) -> None:
    def cancelled(session: Session) -> Iterator[Tensor]:
        yield sound(0.9)
        session.cancel()
        yield sound(0.1)

    with engine.session(**TALK) as session, lm.session(**TALK) as local:
        for turn in range(3):
            listening = session.listen()
            listening.push(sound(1.0, turn))
            if turn % 2:
                listening.drop()
                with pytest.raises(UserError, match="this sound was dropped"):
                    session.ask(listening)
            assert [e.reason for e in session.ask(cancelled(session))] == ["cancelled"]  # type: ignore[union-attr]
            same(session.ask(sound(0.8, turn)).answer(), local.ask(sound(0.8, turn)).answer())
        first, second = session.listen(), session.listen()
        first.push(sound(0.3))
        second.push(sound(0.4))
        first.push(sound(0.3, 1))
        for listening, question in (
            (first, torch.cat([sound(0.3), sound(0.3, 1)])),
            (second, sound(0.4)),
            (second, sound(0.4)),
        ):
            same(session.ask(listening).answer(), local.ask(question).answer())
        with pytest.raises(UserError, match="not finite"):
            session.listen().push([float("nan")])
        third = session.listen()
    with pytest.raises(UserError, match="this session is closed"):
        third.push(sound(0.1))


class Here(Sessions):
    """An engine's process whose threads are in this one."""

    def __init__(self, lm: SpeechLM) -> None:
        ours, theirs = Pipe()
        self.child = Child(theirs, lm, None)
        link = PipeLink(ours, SimpleNamespace(exitcode=0, pid=0, join=lambda *_: None))
        super().__init__(link, lm.config, lm.tokenizer, lm.sample_rate, lm.frame_rate)


def packed(items: Any) -> bytes:
    message = pack(items)
    assert len(message) < 2000
    return message


def test_only_the_last_chunk_is_left_and_no_sound_is_sent_twice(left: list[int]) -> None:
    lm = listener()
    here = Here(lm)
    with here.session(**TALK) as session:
        for turn in range(4):
            question = sound(0.4 + 0.6 * turn, turn)
            listening = session.listen()
            for piece in pieces(question):
                listening.push(piece)
            end = time.monotonic() + 20
            while True:
                (found,) = lm.engine.requests.listening()
                stream = found.stream
                if len(stream.sound) == len(question) and not (stream._lock.locked() or stream.due or found.ready):
                    break
                assert time.monotonic() < end
                time.sleep(0.001)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("omni.engine.process.pack", packed)
                session.ask(listening).answer()
            assert left[-1] <= CHUNK + 2
            assert all(talk._hears is None for talk in here.child.conversations.values())
    here.child._pipe.close()
