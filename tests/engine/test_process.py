"""An engine in its own process gives what one in this process gives, and its end, however it comes, leaves nobody waiting."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest
import torch

from omni.engine.process import EngineProcess
from omni.errors import EngineLost, UserError
from omni.generate.results import AudioChunk, Ended, TextDelta
from omni.generate.speech_lm import SpeechLM
from tests.generate.conftest import tone
from tests.generate.session_toys import ASKED, TALKATIVE, same
from tests.generate.test_answer_stream import (
    LEFT,
    by_cancelling_the_task,
    by_closing_the_loop,
    by_leaving_the_loop,
    left_by_a_loop,
    said,
)
from tests.soon import soon

ROOT = Path(__file__).parents[2]
LONG: dict[str, Any] = {"sampling": TALKATIVE, "max_seconds": 60.0, "max_tokens": 1000}


@pytest.fixture(scope="module")
def lm(saved: Path) -> SpeechLM:
    return SpeechLM.from_pretrained(saved)


@pytest.fixture(scope="module")
def engine(saved: Path) -> Iterator[EngineProcess]:
    resource_tracker.ensure_running()
    with EngineProcess(saved, threads=1) as engine:
        yield engine


def schedule(seed: int) -> list[tuple[int, Any, str, int | None, float | None, int | None]]:
    """Turns of two conversations: which one, what is asked, and after how many events it is cancelled, with what was played
    and shown."""
    chance = random.Random(seed)
    turns = []
    for _ in range(6):
        question, task = chance.choice(ASKED)
        cut = chance.choice([None, 0, 1, 7, 40])
        turns.append((chance.randrange(2), question, task, cut, chance.choice([None, 0.3]), chance.choice([None, None, 4])))
    return turns


def play(engine: Any, seed: int) -> tuple[Any, ...]:
    """What two conversations with a schedule get and remember."""
    got = []
    first, second = {"max_seconds": 2.0, "max_tokens": 50}, {"max_seconds": 1.0, "max_tokens": 40}
    with engine.session(seed=seed, **LONG | first) as one, engine.session(seed=seed + 1, **LONG | second) as two:
        for who, question, task, cut, played, shown in schedule(seed):
            session, events = (one, two)[who], []
            asked = session.ask(question, task)
            for event in asked:
                events.append(event)
                if cut is not None and len(events) == cut + 1:
                    session.cancel(played, shown)
            text = "".join(event.text for event in events if isinstance(event, TextDelta))
            sound = torch.cat([torch.zeros(0), *(e.samples for e in events if isinstance(e, AudioChunk))])
            got.append((text, sound, events[-1].reason, round(events[-1].timings.audio, 6)))
        return got, [told(one), told(two)]


def play_alike(lm: SpeechLM, engine: EngineProcess, seed: int) -> None:
    (ours, our_past), (wanted, past) = play(engine, seed), play(lm, seed)
    assert our_past == past and any(turns for turns, _ in past)
    for mine, other in zip(ours, wanted, strict=True):
        assert mine[0] == other[0] and mine[2:] == other[2:]
        assert torch.equal(mine[1], other[1])


def told(session: Any) -> Any:
    turns = [(t.features, tuple(t.question), t.text, t.codes is not None and t.codes.tolist(), t.cut) for t in session.turns]
    return turns, session.history


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(4))
def test_two_conversations_get_and_remember_what_they_do_in_this_process(
    lm: SpeechLM, engine: EngineProcess, seed: int
) -> None:
    play_alike(lm, engine, seed)


@pytest.mark.long
def test_whole_answers_streams_and_saved_conversations(lm: SpeechLM, engine: EngineProcess, tmp_path: Path) -> None:
    options: dict[str, Any] = {"sampling": TALKATIVE, "seed": 5, "max_seconds": 2.0}
    for question, task in ASKED[:4]:
        mine, other = engine.generate(question, task, **options), lm.generate(question, task, **options)
        same(mine, other)
        assert mine.sample_rate == other.sample_rate
        assert mine.audio is other.audio or torch.equal(mine.audio, other.audio)  # type: ignore[arg-type]
    events = list(engine.stream("a", "T1A2", **options))
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == lm.generate("a", "T1A2", **options).text
    with engine.session(**options) as session:
        session.ask(tone(0.3)).answer()
        session.save(tmp_path / "talk")
        turns = session.turns
    with engine.session(history=tmp_path / "talk", **options) as session, lm.session(history=tmp_path / "talk") as other_one:
        assert [t.text for t in session.turns] == [t.text for t in turns] == [t.text for t in other_one.turns]
    assert engine.call("adapters") == () and engine.call("engine.fixed") is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("leave", [by_cancelling_the_task, by_leaving_the_loop, by_closing_the_loop])
def test_what_a_task_took_is_remembered(lm: SpeechLM, engine: EngineProcess, leave: Any) -> None:
    with engine.session(**LEFT) as remote:
        assert leave(remote) == left_by_a_loop(lm)


@pytest.mark.long
def test_log_probabilities_and_stop_functions(lm: SpeechLM, engine: EngineProcess) -> None:
    options: dict[str, Any] = {"sampling": TALKATIVE, "seed": 5, "max_seconds": 0.6, "max_tokens": 20}
    for task in ("T1A2", "T1T2", "T1A1"):
        mine, other = (place.generate("go on", task, logprobs=True, **options).logprobs for place in (engine, lm))
        assert mine is not None and other is not None and mine.text == other.text
        assert mine.codes is other.codes is None or torch.equal(mine.codes, other.codes)  # type: ignore[arg-type]
    assert engine.generate("go on", "T1T2", **options).logprobs is None

    found: list[Any] = []
    for place in (engine, lm):
        with place.session(stop=lambda text: len(text) >= 5, **options) as session:
            answer = session.ask("go on", "T1T2").answer()
            found.append([answer.text, answer.ended, answer.tokens, told(session)])
        with place.session(**options) as session:
            found[-1] += [said(list(session.ask(iter(tone(0.3).split(777)))))]
    assert found[0] == found[1] and found[0][1] == "stop"
    with engine.session(stop=lambda text: 1 / 0 > 1, **options) as session:  # type: ignore[arg-type]
        last = list(session.ask("go on", "T1T2"))[-1]
        assert last.reason == "error" and "ZeroDivisionError" in last.error and not session.turns  # type: ignore[union-attr]


@pytest.mark.long
def test_who_does_not_read_lets_the_row_rest(engine: EngineProcess) -> None:
    with engine.session(**LONG | {"max_seconds": 10.0}) as session:
        events = session.ask("on and on", "T1A2")
        kinds = [type(next(events)) for _ in range(3)]
        answer = session._last
        assert answer is not None
        time.sleep(0.4)
        assert len(answer._events) <= 2 * 64 + 8
        rest = list(events)  # and it goes on where it was
        assert isinstance(rest[-1], Ended) and len(kinds) + len(rest) > 200


def test_a_cancel_from_another_thread_ends_who_waits(engine: EngineProcess) -> None:
    with engine.session(**LONG) as session:
        events: list[Any] = []
        consumer = threading.Thread(target=lambda: [events.append(e) for e in session.ask("on and on", "T1A2")])
        consumer.start()
        assert soon(lambda: len(events) >= 20)
        session.cancel()
        consumer.join(20)
        assert not consumer.is_alive() and events[-1].reason == "cancelled"
        text = "".join(e.text for e in events if isinstance(e, TextDelta))
        assert session.history[-1].text is not None and text.startswith(session.history[-1].text) and session.history[-1].cut


def test_a_cancel_after_the_end_has_come_but_was_not_taken(lm: SpeechLM, engine: EngineProcess) -> None:
    for place in (lm, engine):
        with place.session(max_tokens=3) as session:
            events = session.ask("go on", "T1T2")
            while place is engine and session._last._ended is None:  # type: ignore[union-attr]
                time.sleep(0.001)
            session.cancel()
            assert [event.reason for event in events] == ["cancelled"]  # type: ignore[union-attr]


@pytest.mark.long
def test_loading_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path.name}.*config.json|config.json.*{tmp_path.name}"):
        EngineProcess(tmp_path)
    with pytest.raises(UserError, match="slots is 0"):
        EngineProcess(tmp_path, slots=0)


def open_things() -> tuple[int, int, list[str]]:
    """Number of descriptors and threads, and the children; threads of engines in this process end with their models."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    names = [t.name for t in threading.enumerate() if t.name not in ("omni-engine", "omni-sound")]
    return len(os.listdir("/proc/self/fd")), len(names), children


@pytest.mark.long
def test_killed_or_closed_it_leaves_nothing_and_nobody_waiting(saved: Path, engine: EngineProcess) -> None:
    before = open_things()
    other = EngineProcess(saved, threads=1, slots=1, patience=0.4)
    session, silent = other.session(**LONG, pace="live"), other.session()
    with other.session(**LONG, pace="live") as live:
        events = live.ask("on and on", "T1A2")
        while live._last is not None and live._last._ended is None:
            time.sleep(0.02)
        unread = list(events)  # as much as a live listener may leave
        assert len(unread) < 2 * 60 and live.turns == () and "nobody has read this answer for 0.4 s" in str(unread[-1])
    with other.session(text_assist=True) as wide:
        with pytest.raises(UserError, match="takes 2 slots"):
            wide.ask("a", "T1A2")
        assert wide.turns == () and wide.place == 0
    events = session.ask("on and on", "T1A2")
    next(events)
    assert other.pid is not None
    os.kill(other.pid, signal.SIGKILL)
    rest = list(events)
    assert rest[-1].reason == "error" and "SIGKILL" in rest[-1].error and "start another" in rest[-1].error
    assert 0 < (rest[-1].timings.first_text or rest[-1].timings.first_audio) <= rest[-1].timings.total
    for call in (lambda: silent.ask("a", "T1T2"), lambda: session.history, other.session, lambda: other.call("adapters")):
        with pytest.raises(EngineLost, match="SIGKILL"):
            call()
    session.close()
    silent.close()
    other.close()
    assert open_things() == before
    assert engine.generate("a", "T1T2", max_tokens=3).timings.steps > 0  # the other one goes on


@pytest.mark.long
def test_a_process_that_has_stopped_is_killed_in_the_end(
    saved: Path, engine: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omni.engine.process.PATIENCE", 0.5)
    before = open_things()
    other = EngineProcess(saved, threads=1)
    assert other.pid is not None
    os.kill(other.pid, signal.SIGSTOP)
    other.close()
    assert open_things() == before


CLIENT = """
import os, signal, sys, time
from omni.engine.process import EngineProcess
if __name__ == "__main__":
    engine = EngineProcess({folder!r}, threads=1, plugins=["tests.engine.echo"])
    session = engine.session(max_seconds=60.0, max_tokens=1000)
    events = session.ask("on", "T1A2")
    next(events)
    os.killpg(0, signal.SIGINT) if {how!r} == "interrupt" else None
    print(engine.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
def test_it_ends_with_the_process_of_its_clients_and_not_before(saved: Path, tmp_path: Path) -> None:
    script = tmp_path / "client.py"
    ignoring = "import signal\nsignal.signal(signal.SIGINT, lambda *_: None)\n"
    script.write_text(ignoring + CLIENT.format(folder=str(saved), how="interrupt"))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=ROOT, start_new_session=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    proc = Path(f"/proc/{int(done.stdout)}")
    assert soon(lambda: not proc.exists() or " Z " in (proc / "stat").read_text()), "it is still there"
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_sigterm_lets_answers_end_and_takes_no_new_ones(saved: Path) -> None:
    engine = EngineProcess(saved, threads=1)
    options = LONG | {"max_seconds": 2.0}
    session, other = engine.session(**options), engine.session()
    events = session.ask("on and on", "T1A2")
    next(events)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGTERM)
    time.sleep(0.3)
    with pytest.raises(UserError, match="about to end"):
        other.ask("a", "T1T2")
    assert [e.reason for e in events if isinstance(e, Ended)] in (["length"], ["end"])
    soon(lambda: not engine.alive)
    with pytest.raises(EngineLost, match="closed"):
        other.ask("a", "T1T2")
    engine.close()
