"""Runs `omni-infer chat` over a stand-in for the sound library, with the tiny model of `tests/infer`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from infer.chat.connection import LocalConnection
from infer.serve.realtime.playback import Outlet
from infer.serve.realtime.session import RealtimeSession
from infer.serve.realtime.state import ConversationItem
from tests.infer.chat.fake_sound import FakeSound, LevelVad, LockstepQueue, Script
from tests.infer.conftest import Done


@dataclass
class Talked:
    """What a chat has done.

    Attributes:
        asked: the samples of each question; `cut`, the milliseconds of answers that the session was told were heard.
    """

    done: Done
    sound: FakeSound
    asked: list[np.ndarray] = field(default_factory=list)
    cut: list[int] = field(default_factory=list)


Talks = Callable[..., Talked]


@pytest.fixture
def talk(run: Any, monkeypatch: pytest.MonkeyPatch) -> Talks:
    """Run a chat over a script; its session has done with each event before the next block comes."""

    def call(script: Script | None, *words: object, sound: FakeSound | None = None) -> Talked:
        fake = sound or FakeSound(script)
        talked = Talked(Done(0, b"", ""), fake)
        add = RealtimeSession.add_item

        def recorded(self: RealtimeSession, item: ConversationItem, *after: Any) -> None:
            if item.content and item.content[0].sound is not None:
                talked.asked.append(item.content[0].sound)
            add(self, item, *after)

        def send(self: LocalConnection, event: dict[str, Any]) -> None:
            if event["type"] == "conversation.item.truncate":
                talked.cut.append(event["audio_end_ms"])
            asyncio.run_coroutine_threadsafe(self.session.handle(json.dumps(event)), self.loop).result(20)

        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "sounddevice", fake)
            patch.setattr("infer.chat.chat.SimpleQueue", lambda: LockstepQueue(fake))
            patch.setattr("infer.chat.connection.VoiceActivity", LevelVad)
            patch.setattr("infer.chat.connection.DeliveringTransport.outlet", lambda _, *of: Outlet(*of, lambda: fake.now))
            patch.setattr(LocalConnection, "send", send)
            patch.setattr(RealtimeSession, "add_item", recorded)
            talked.done = run("chat", *words)
        return talked

    return call
