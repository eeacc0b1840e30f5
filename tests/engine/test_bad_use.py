"""What sessions do on a closed engine, and when Ctrl-C comes while somebody waits."""

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

FORK = """
import os, sys
from omni.engine.process import EngineProcess
if __name__ == "__main__":
    session = EngineProcess(sys.argv[1], threads=1, plugins=["tests.engine.echo"]).session(max_seconds=70.0)
    events = session.ask("go on", "T1A2")
    print(next(events) is not None, flush=True)
    if (child := os.fork()) == 0:
        sys.exit(7)  # the iterator and the session end here, too
    print(os.waitpid(child, 0)[1] >> 8, next(events) is not None, flush=True)
"""


@pytest.fixture
def lm() -> SpeechLM:
    return make_lm(LAYOUTS["pad"], context=2000)


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_ends_and_leaves_the_answers_to_its_parent(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(FORK)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(tmp_path / "client.py"), str(saved)],
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert not done.stderr and done.stdout.splitlines() == ["True", "7 True"]


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
