"""Ending a session or an answer: from another thread, the consumer's loop, a step itself, at the interpreter's exit."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from omni.checkpoint.folder import save_folder
from omni.errors import UserError
from omni.generate.results import Ended, Event
from omni.generate.runner import Runner
from omni.generate.speech_lm import SpeechLM
from omni.layout import Layout
from omni.text import Tokenizer
from tests.generate.conftest import LAYOUTS, make_lm, make_model
from tests.generate.session_toys import inside, is_free

ROOT = Path(__file__).parents[2]


@pytest.fixture
def lm() -> SpeechLM:
    return make_lm(LAYOUTS["pad"], context=2000)


def ended(events: list[Event]) -> str:
    assert isinstance(events[-1], Ended)
    return events[-1].reason


def test_close_from_another_thread_waits_for_the_step_and_frees_the_cache(
    lm: SpeechLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, step = lm.session(max_seconds=70.0), Runner.step
    inside, go_on = threading.Event(), threading.Event()
    events: list[Event] = []

    def waiting(runner: Runner, *rows: Any) -> None:
        if len(events) >= 3:
            inside.set()
            assert go_on.wait(30)
            assert runner.rows[0] is not None  # nobody has freed it meanwhile
        step(runner, *rows)

    monkeypatch.setattr(Runner, "step", waiting)
    consumer = threading.Thread(target=lambda: [events.append(event) for event in session.ask("go on", "T1A2")])
    consumer.start()
    assert inside.wait(30)
    closer = threading.Thread(target=session.close)
    closer.start()
    closer.join(0.2)
    assert closer.is_alive()
    go_on.set()
    closer.join(30)
    consumer.join(30)
    assert not closer.is_alive() and not consumer.is_alive()
    assert ended(events) == "cancelled" and is_free(lm) and len(session.turns) == 1
    with pytest.raises(UserError, match="closed"):
        session.ask("again", "T1A2")


@pytest.mark.parametrize("after", [0.0, 0.004, 0.02])
def test_a_signal_s_handler_may_close_the_session_that_it_interrupts(lm: SpeechLM, after: float) -> None:
    session = lm.session(max_seconds=70.0)
    before = signal.signal(signal.SIGALRM, lambda *_: session.close())
    try:
        events = session.ask("go on", "T1A2")
        signal.setitimer(signal.ITIMER_REAL, after + 1e-4)
        assert ended(list(events)) == "cancelled" and is_free(lm)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_answer_that_is_cancelled_between_events_is_in_the_history_at_once(lm: SpeechLM, tmp_path: Path) -> None:
    with lm.session(max_seconds=70.0) as session:
        events = session.ask("go on", "T1A2")
        for _ in range(5):
            next(events)
        session.cancel(played_seconds=0.04)
        turn = session.turns[-1]
        assert turn.codes is not None and turn.codes.shape[1] == 1 and len(session.history) == 2
        with lm.session(history=session.save(tmp_path / "talk")) as other:
            assert len(other.turns) == 1
        assert ended(list(events)) == "cancelled" and len(session.turns) == 1


BAD: list[dict[str, Any]] = [
    {"played_seconds": float("nan")}, {"played_seconds": -0.1}, {"played_seconds": float("inf")}, 
    {"shown_characters": -1}, 
]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bad", BAD, ids=str)
def test_a_bad_cancel_is_refused_and_the_answer_goes_on(lm: SpeechLM, bad: dict[str, Any]) -> None:
    with lm.session(max_seconds=0.4, max_tokens=30) as session:
        whole = session.ask("go on", "T1A2", seed=1).answer()
        kept = inside(session)._past[-1]
        with pytest.raises(UserError, match=[*bad][-1]):
            session.cancel(**bad)
        assert inside(session)._past[-1] is kept
        events = session.ask("go on", "T1A2", seed=1)
        taken = [next(events)]
        with pytest.raises(UserError, match=[*bad][-1]):
            session.cancel(**bad)
        taken += events
        assert ended(taken) == whole.ended != "cancelled" and len(session.turns) == 2
        codes = session.turns[-1].codes
        session.cancel(played_seconds=1e8, shown_characters=2**62)  # more than was played is all of it
        assert codes is not None and torch.equal(session.turns[-1].codes, codes)  # type: ignore[arg-type]


@pytest.mark.long
def test_iterators_that_are_still_held_at_the_interpreter_s_exit_are_silent(tmp_path: Path) -> None:
    model = make_model(Layout.preset("codec2"))
    save_folder(tmp_path / "model", model.config, model.state_dict(), Tokenizer.bytes())
    code = (
        "from omni import SpeechLM\n"
        f"lm = SpeechLM.from_pretrained({str(tmp_path / 'model')!r})\n"
        "events = lm.stream('hello', 'T1A2')\n"
        "next(events); next(events)\n"
        "session = lm.session()\n"
        "more = session.ask('hello', 'T1A2')\n"
        "next(more)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
