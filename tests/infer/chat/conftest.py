"""Runs `omni-infer chat` over a stand-in for the sound library, with the tiny model of `tests/infer`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from infer.chat.questions import SpokenTurn
from omni.generate.session import Session
from tests.infer.chat.fake_sound import FakeSound, LevelVad, LockstepQueue, Script
from tests.infer.conftest import Done


@dataclass
class Talked:
    """What a chat has done.

    Attributes:
        asked: the pieces of each question, joined; `cancelled`, the seconds heard that the session was told.
    """

    done: Done
    sound: FakeSound
    asked: list[np.ndarray] = field(default_factory=list)
    cancelled: list[float] = field(default_factory=list)


Talks = Callable[..., Talked]


@pytest.fixture
def talk(run: Any, monkeypatch: pytest.MonkeyPatch) -> Talks:
    """Run a chat over a script."""

    def call(script: Script | None, *words: object, sound: FakeSound | None = None) -> Talked:
        fake = sound or FakeSound(script)
        talked = Talked(Done(0, b"", ""), fake)
        pieces, cancel = SpokenTurn.pieces, Session.cancel

        def recorded(self: SpokenTurn) -> Iterator[tuple[np.ndarray, bool]]:
            talked.asked.append(np.zeros(0, np.int16))
            for piece, sure in pieces(self):
                if sure:
                    talked.asked[-1] = np.concatenate([talked.asked[-1], piece])
                yield piece, sure

        def noted(self: Session, played_seconds: float | None = None, shown_characters: int | None = None) -> None:
            if played_seconds is not None:
                talked.cancelled.append(played_seconds)
            cancel(self, played_seconds, shown_characters)

        monkeypatch.setitem(sys.modules, "sounddevice", fake)
        monkeypatch.setattr("infer.chat.chat.SimpleQueue", lambda: LockstepQueue(fake))
        monkeypatch.setattr("infer.chat.chat.Silero", LevelVad)
        monkeypatch.setattr(SpokenTurn, "pieces", recorded)
        monkeypatch.setattr(Session, "cancel", noted)
        talked.done = run("chat", *words)
        monkeypatch.setattr(SpokenTurn, "pieces", pieces)
        monkeypatch.setattr(Session, "cancel", cancel)
        return talked

    return call
