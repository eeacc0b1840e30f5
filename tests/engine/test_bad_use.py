"""What sessions do on a closed engine, in a process that was forked, and when Ctrl-C comes while somebody waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from omni.errors import UserError
from omni.generate.results import Ended
from omni.generate.runner import Runner
from omni.generate.speech_lm import SpeechLM
from tests.generate.conftest import LAYOUTS, make_lm

ROOT = Path(__file__).parents[2]

FORK = """
import os
from tests.generate.conftest import LAYOUTS, make_lm
lm = make_lm(LAYOUTS["pad"], context=2000)
session, other = lm.session(max_seconds=70.0), lm.session(max_seconds=70.0)
events = other.ask("go on", "T1A2")
next(events)
if (child := os.fork()) == 0:
    for use in (lambda: session.ask("x", "T1T2"), lambda: session.start("x", "T1T2", on_event=print), session.cancel,
                lambda: list(events), lm.session, lambda: lm.generate("x", "T1T2")):
        try:
            use()
            print("no error", flush=True)
        except Exception as error:
            print(type(error).__name__, "was forked from it" in str(error), flush=True)
    session.close()
    os._exit(0)
print("exit", os.waitpid(child, 0)[1], flush=True)
more = next(events)
other.close()
print(more is not None, [event.reason for event in events])
"""


@pytest.fixture
def lm() -> SpeechLM:
    return make_lm(LAYOUTS["pad"], context=2000)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_is_told_and_hangs_nowhere() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.splitlines() == ["UserError True"] * 6 + ["exit 0", "True ['cancelled']"], done.stdout + done.stderr


def test_a_session_of_a_closed_engine_is_told(lm: SpeechLM) -> None:
    idle, asked = lm.session(max_seconds=70.0), lm.session(max_seconds=70.0)
    events = asked.ask("go on", "T1A2")
    next(events)
    ends: list[Any] = []
    waiting = lm.session(max_seconds=70.0).start("go on", "T1A2", on_event=lambda event: None)
    reader = threading.Thread(target=lambda: ends.append(waiting.wait(30)))
    reader.start()
    lm.engine.close()
    reader.join(30)
    last = list(events)[-1]
    assert isinstance(last, Ended) and last.reason == "cancelled" and ends[0].reason == "cancelled"
    for use in (lambda: idle.ask("x", "T1T2"), lambda: asked.answer("x", "T1T2"), lm.session):
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
            assert session.answer("and then", "T1T2").ended in ("end", "length")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_question_that_the_engine_refuses_leaves_nothing_behind(lm: SpeechLM) -> None:
    with lm.session(text_assist=True, max_seconds=0.4) as session:
        lm.engine._batch.fixed = 1
        with pytest.raises(UserError, match="2 slots"):
            session.ask("go on", "T1A2")
        lm.engine._batch.fixed = None
        assert not session.turns and session.answer("go on", "T1A2").ended in ("end", "length")
