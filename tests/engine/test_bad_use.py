"""What sessions do on a closed engine, and when Ctrl-C comes while somebody waits."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

from omni.errors import UserError
from omni.generate.results import Ended
from omni.generate.runner import Runner
from omni.generate.speech_lm import SpeechLM
from tests.generate.conftest import LAYOUTS, make_lm


@pytest.fixture
def lm() -> SpeechLM:
    return make_lm(LAYOUTS["pad"], context=2000)


def test_a_session_of_a_closed_engine_is_told(lm: SpeechLM) -> None:
    idle, asked = lm.session(max_seconds=70.0), lm.session(max_seconds=70.0)
    events = asked.ask("go on", "T1A2")
    next(events)
    ends: list[Any] = []
    waiting = lm.session(max_seconds=70.0).ask("go on", "T1A2")
    reader = threading.Thread(target=lambda: ends.extend(list(waiting)[-1:]))
    reader.start()
    lm.engine.close()
    reader.join(30)
    last = list(events)[-1]
    assert isinstance(last, Ended) and last.reason == "cancelled" and ends[0].reason == "cancelled"
    for use in (lambda: idle.ask("x", "T1T2"), lambda: asked.ask("x", "T1T2").answer(), lm.session):
        with pytest.raises(UserError, match="engine is closed"):
            use()
    idle.close()
    asked.close()


def test_ctrl_c_while_an_event_is_awaited(lm: SpeechLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, go_on = Runner.step, threading.Event()

    def waiting(runner: Runner, *rows: Any) -> None:
        go_on.wait(0.5)
        step(runner, *rows)

    monkeypatch.setattr(Runner, "step", waiting)

    def interrupt(*_: Any) -> None:
        go_on.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with lm.session(max_tokens=5) as session:
            events = session.ask("go on", "T1T2")
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                list(events)
            assert len(session.turns) == 1
            assert session.ask("and then", "T1T2").answer().ended in ("end", "length")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_sessions_fit_the_rows_of_an_engine_whose_context_is_short(lm: SpeechLM) -> None:
    lm.start_engine(slots=2, context=24)
    wanted = lm.generate("on", "T1T2", max_tokens=3, context=24)
    assert lm.generate("on", "T1T2", max_tokens=3).tokens == wanted.tokens
    with pytest.raises(UserError, match="context is 25, and the engine's rows have 24 positions"):
        lm.session(context=25)
