"""What was heard of a sound that is still coming, asked by another session of the same engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.test_listen_process import Here
from tests.generate.listening_toys import TALK, left, listener, sound, wait_until_heard
from tests.generate.session_toys import same

__all__ = ["left"]

CHUNK = 2560
"""Samples of a chunk at 16 kHz."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", ["here", "another process"])
def test_it_is_answered_as_the_whole_chunks_that_came(where: str, left: list[int]) -> None:
    lm = listener()
    question = sound(2.5, 4)
    engine: Any = lm if where == "here" else Here(lm)
    with engine.session(**TALK) as session, engine.session(**TALK) as beside, lm.session(**TALK) as other:
        listening = session.listen("A1A2")
        for number, piece in enumerate(question.split(8_000), 1):
            listening.push(piece)
            wait_until_heard(lm)
            if where != "here":
                while lm.engine.requests.listening()[0].stream._came < 8_000 * number:
                    pass
                wait_until_heard(lm)
            heard = question[: 8_000 * number // CHUNK * CHUNK]
            for task in ("A1T1", "A1A2"):
                with lm.session(**TALK) as alone:
                    wanted = alone.ask(heard, task).answer()
                events = list(beside.ask(listening.so_far(), task))
                assert "".join(getattr(event, "text", "") for event in events) == wanted.text
                beside.end(beside._last, "withdraw")
            if number > 1 and task == "A1A2":
                assert left[-1] <= 8_000 // CHUNK * 4 + 8  # only what came since, and the columns after it
        assert beside.history == []
        same(session.ask(listening).answer(), other.ask(question).answer())


def test_the_engine_has_time_to_spare_only_while_nobody_needs_it() -> None:
    lm = listener()
    assert lm.engine.spare
    with lm.session(**TALK | {"max_seconds": 30.0, "max_tokens": 4000}) as session, lm.session(**TALK) as listener_:
        events = session.ask(sound(0.5))
        next(events)
        assert not lm.engine.spare  # a program reads
        session.cancel()
        list(events)
        assert lm.engine.spare
        listening = listener_.listen()
        lm.engine.requests.listen = lambda given: None  # type: ignore[method-assign]
        lm.engine.requests.listening()[0].stream._waiting.append(torch.zeros(CHUNK))
        lm.engine.requests.listening()[0].stream._came += CHUNK
        assert not lm.engine.spare  # somebody speaks who was not heard yet
        listening.drop()
        assert lm.engine.spare
