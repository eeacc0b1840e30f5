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

USES = """
def use(*calls):
    for call in calls:
        try:
            call()
            print("no error", flush=True)
        except Exception as error:
            print(type(error).__name__, "was forked from it" in str(error), flush=True)
"""

FORK = (
    USES
    + """
import asyncio, os, sys, threading, time
import torch
from omni.edit.deltas import Delta, Edits
from omni.lora.attach import CHANGING
from tests.generate.conftest import LAYOUTS, make_lm
lm = make_lm(LAYOUTS["pad"], context=2000)
edits = Edits({"decoder.blocks.1.mlp.down": Delta(torch.ones(1, lm.config.decoder.width), torch.ones(1, 48))})
session, other, edited, tasks = (lm.session(max_seconds=70.0, edits=own) for own in (None, None, edits, None))
events = other.ask("go on", "T1A2")
next(events)
started = session.start("go on", "T1A2", on_event=lambda event: None)
loop = asyncio.new_event_loop()
awaited = tasks.ask_async("go on", "T1A2")
loop.run_until_complete(awaited.__anext__())

def change():
    while True:  # as the engine's thread, which looks at the adapters with each piece that it feeds
        with CHANGING:
            time.sleep(0.002)

threading.Thread(target=change, daemon=True).start()
for number in range(int(sys.argv[1])):
    time.sleep(0.001 * (number % 3))
    if (child := os.fork()) == 0:
        use(lambda: session.ask("x", "T1T2"), lambda: session.start("x", "T1T2", on_event=print), session.cancel,
            lambda: list(events), lm.session, lambda: lm.generate("x", "T1T2"), lambda: lm.session(edits=edits),
            started.wait, lm.engine.stats, lambda: session.place, lambda: session.save("nowhere"))
        edited = awaited = None  # dropped, as when a function ends
        session.close()
        sys.exit(number)
    print("exit", os.waitpid(child, 0)[1] >> 8, flush=True)
more = next(events)
other.close()
session.close()
print(more is not None, [event.reason for event in events])
"""
)

PROCESS_FORK = (
    USES
    + """
import os, sys
from omni.engine.process import EngineProcess
if __name__ == "__main__":
    engine = EngineProcess(sys.argv[1], threads=1, plugins=["tests.engine.echo"])
    session = engine.session(max_seconds=70.0)
    events = session.ask("go on", "T1A2")
    next(events)
    if (child := os.fork()) == 0:
        use(lambda: session.ask("x", "T1T2"), session.cancel, lambda: list(events), engine.session, lambda: session.history)
        session.close()
        engine.close()
        sys.exit(7)
    print("exit", os.waitpid(child, 0)[1] >> 8, flush=True)
    print(next(events) is not None)
"""
)


@pytest.fixture
def lm() -> SpeechLM:
    return make_lm(LAYOUTS["pad"], context=2000)


def run(*arguments: str) -> list[str]:
    """Lines that a script of Python writes; it writes no errors."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert not done.returncode and not done.stderr, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("forks", [1, pytest.param(30, marks=pytest.mark.long)])
def test_forked_processes_are_told_and_hang_nowhere(forks: int) -> None:
    lines = run("-c", FORK, str(forks))
    assert lines[:-1] == [line for n in range(forks) for line in (*["UserError True"] * 11, f"exit {n}")]
    assert lines[-1] == "True ['cancelled']"


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_process_forked_from_an_engines_clients_is_told(saved: Path, tmp_path: Path) -> None:
    script = tmp_path / "client.py"
    script.write_text(PROCESS_FORK)
    assert run(str(script), str(saved)) == [*["UserError True"] * 5, "exit 7", "True"]


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
        session.answer("go on", "T1A2")
        before = session.turns
        lm.engine._batch.fixed = 1
        with pytest.raises(UserError, match="2 slots"):
            session.ask("and then", "T1A2")
        lm.engine._batch.fixed = None
        session.cancel(played_seconds=0.1)  # of what is not there
        assert [(turn.question, turn.text) for turn in session.turns] == [(turn.question, turn.text) for turn in before]
        assert session.answer("go on", "T1A2").ended in ("end", "length")


def test_numbers_that_an_engine_cannot_take(lm: SpeechLM) -> None:
    for options, told in (
        ({"context": 0}, "context is 0"),
        ({"context": "x"}, "context is 'x'"),
        ({"queue": -1}, "queue is -1"),
        ({"queue": 1.5}, "queue is 1.5"),
        ({"slots": 0}, "slots"),
    ):
        with pytest.raises(UserError, match=told):
            lm.start_engine(**options)
    with pytest.raises(TypeError, match=r"start_engine\(\) has no keyword 'slot'; did you mean 'slots'"):
        lm.start_engine(slot=2)
    for seconds in (-1, float("nan"), "a", None):
        with pytest.raises(UserError, match="drain is"):
            lm.engine.drain(seconds)  # type: ignore[arg-type]
    assert lm.generate("on", "T1T2", max_tokens=3).timings.steps > 0  # it was not drained


def test_sessions_fit_the_rows_of_an_engine_whose_context_is_short(lm: SpeechLM) -> None:
    lm.start_engine(slots=2, context=24)
    wanted = lm.generate("on", "T1T2", max_tokens=3, context=24)
    assert lm.generate("on", "T1T2", max_tokens=3).tokens == wanted.tokens
    with pytest.raises(UserError, match="context is 25, and the engine's rows have 24 positions"):
        lm.session(context=25)


def test_a_listener_that_would_end_the_program_ends_its_answer(lm: SpeechLM) -> None:
    with lm.session(max_seconds=70.0) as session:
        ended = session.start("go on", "T1A2", on_event=lambda event: sys.exit(3)).wait(60)
        assert ended is not None and ended.reason == "error" and "the listener raised SystemExit: 3" in str(ended.error)
        assert session.turns == ()
