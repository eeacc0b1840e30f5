"""What was heard of a sound that is still coming, asked by another session of the same engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from omni.errors import UserError
from tests.engine.test_listen_process import Here
from tests.generate.listening_toys import TALK, left, listener, same, sound, wait_until_heard

__all__ = ["left"]

CHUNK = 2560
"""Samples of a chunk at 16 kHz."""


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
                while lm.engine._requests.listens.open()[0].stream._came < 8_000 * number:
                    pass
                wait_until_heard(lm)
            heard = question[: 8_000 * number // CHUNK * CHUNK]
            for task in ("A1T1", "A1A2"):
                with lm.session(**TALK) as alone:
                    wanted = alone.ask(heard, task).answer()
                events = list(beside.ask(listening.so_far(), task))
                assert "".join(getattr(event, "text", "") for event in events) == wanted.text
                beside.withdraw(beside._last)
            if number > 1 and task == "A1A2":
                assert left[-1] <= 8_000 // CHUNK * 4 + 8  # only what came since, and the columns after it
        assert beside.history == []
        same(session.ask(listening).answer(), other.ask(question).answer())


def test_what_cannot_be_asked_so_far() -> None:
    lm = listener()
    with lm.session(**TALK) as session, lm.session(**TALK) as beside:
        listening = session.listen("A1A2")
        with pytest.raises(UserError, match="nothing of this sound has been heard so far; ask later"):
            beside.ask(listening.so_far(), "A1T1").answer()
        listening.push(sound(0.5))
        wait_until_heard(lm)
        with pytest.raises(UserError, match="asks in writing, but the question is sound"):
            beside.ask(listening.so_far(), "T1T2").answer()
        listening.drop()
        with pytest.raises(UserError, match="this sound was dropped"):
            beside.ask(listening.so_far(), "A1T1").answer()
        assert beside.history == []
    whole = listener(encoder=replace(lm.config.encoder, mode="variable"))  # type: ignore[type-var]
    with whole.session(**TALK) as session, whole.session(**TALK) as beside:
        listening = session.listen()
        listening.push(sound(0.5))
        with pytest.raises(UserError, match="this encoder hears whole questions only"):
            beside.ask(listening.so_far(), "A1T1").answer()


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
        lm.engine.listen = lambda given: None  # type: ignore[method-assign]
        lm.engine._requests.listens.open()[0].stream._waiting.append(torch.zeros(CHUNK))
        lm.engine._requests.listens.open()[0].stream._came += CHUNK
        assert not lm.engine.spare  # somebody speaks who was not heard yet
        listening.drop()
        assert lm.engine.spare
