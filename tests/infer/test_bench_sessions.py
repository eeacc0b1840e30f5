"""Live sessions of the bench: what people note is what came, the picture is there, bad options are told.

No figure is asked to be fast.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from infer.bench import people
from infer.bench.live import COLUMNS, LiveFigures, LiveTable, cells, draw
from infer.bench.people import AnswerListener, LiveLoad, PlayedAudio, Workload
from omni import plugins
from omni.codec.registry import CODECS, load_codec
from omni.config import to_dict
from omni.engine.stats import EngineStats, Percentiles, StepCost, StepCosts
from omni.generate.results import AudioChunk, Ended, Event, Timings
from omni.generate.session import Session
from omni.layout import Layout

FRAME = 0.02


class FakeAnswer:
    """Gives chunks at given times after it was asked, in a thread, as `Listener` does."""

    def __init__(self, times: list[float]) -> None:
        self.changed, self.wake = threading.RLock(), None
        self._events: list[Event] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(times,))
        self._thread.start()

    def _run(self, times: list[float]) -> None:
        start = time.perf_counter()
        for number, at in enumerate(times):
            if self._stopped.wait(max(0.0, start + at - time.perf_counter())):
                return
            self.put(AudioChunk(torch.zeros(1), number * FRAME, (number + 1) * FRAME))
        self.put(Ended("length", Timings()))

    def put(self, event: Event) -> None:
        with self.changed:
            self._events.append(event)
            if self.wake is not None:
                self.wake()

    def poll(self) -> Event | None:
        with self.changed:
            if self._events and isinstance(self._events[0], Ended):
                return self._events[0]
            return self._events.pop(0) if self._events else None

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        self.put(Ended("cancelled", Timings()))


class FakeEngine:
    """Sessions whose answers come as told; `log` has what they were asked for, and when."""

    def __init__(self, times: list[float]) -> None:
        self.times = times
        self.log: list[tuple[str, Any]] = []
        self.open = 0

    def session(self, **options: Any) -> Any:
        self.open += 1
        answers: list[FakeAnswer] = []

        def ask(*_: Any) -> FakeAnswer:
            self.log.append(("ask", time.perf_counter()))
            answers.append(FakeAnswer(self.times))
            return answers[-1]

        def cancel(played_seconds: float) -> None:
            self.log.append(("cancel", played_seconds))
            answers[-1].stop()

        def close() -> None:
            self.open -= 1
            for answer in answers:
                answer._stopped.set()

        self.log.append(("session", options))
        commit = lambda: self.log.append(("commit", len(answers)))  # noqa: E731
        calls = {"read": ask, "begin": lambda answer: None, "commit": commit, "cancel": cancel, "close": close}
        return Mock(spec_set=Session, **calls)  # with no call that a session lacks

    def count(self, kind: str) -> int:
        return sum(one == kind for one, _ in self.log)


def manner(**own: Any) -> Workload:
    return replace(Workload(torch.zeros(800), 4 * FRAME, 0.0, False), **own)  # 50 ms of question


async def played(engine: FakeEngine, how: Workload, done: Callable[[PlayedAudio], bool]) -> PlayedAudio:
    load = LiveLoad(engine, how, 64)  # type: ignore[arg-type]
    try:
        heard = load.heard = PlayedAudio()
        load.invite(1)
        end = time.perf_counter() + 20
        while not done(heard):
            assert time.perf_counter() < end
            await load.wait(0.002)
        load.heard = None
    finally:
        await load.close()
    assert engine.open == 0
    return heard


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(people, "PAUSE", (0.03, 0.05))


def test_lateness_is_when_a_chunk_came_less_when_it_was_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third chunk is 60 ms late, which moves the fourth's time by as much; a chunk is due when those before have played."""
    now = [100.0]
    monkeypatch.setattr(people, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    noted: list[tuple[str, Any]] = []
    load = SimpleNamespace(
        workload=manner(), heard=None, random=random.Random(0), note=lambda what, *value: noted.append((what, *value))
    )
    answer = SimpleNamespace(changed=threading.RLock(), wake=None, poll=lambda: events.pop(0) if events else None)
    session, loop = SimpleNamespace(read=lambda *_: answer, begin=lambda _: None), SimpleNamespace()
    loop.call_soon_threadsafe = lambda set_: set_()
    events: list[Event] = []
    now[0] = 99.5
    hearer = AnswerListener(load, session, loop)  # type: ignore[arg-type]
    for number, at in enumerate((100.0, 100.0, 100.1, 100.1)):
        now[0] = at
        events.append(AudioChunk(torch.zeros(1), number * FRAME, (number + 1) * FRAME))
        answer.wake()
    now[0] = 100.11
    events.append(Ended("length", Timings()))
    answer.wake()
    assert [what for what, *_ in noted] == ["first_audio", "lateness", "lateness", "underruns", "lateness", "answers"]
    assert [value for what, *value in noted if what == "first_audio"] == [[0.5]]
    late = [value for what, *rest in noted if what == "lateness" for value in rest]
    assert late == pytest.approx([-FRAME, 0.1 - 2 * FRAME, -FRAME])
    assert hearer.end - hearer.played() == pytest.approx(2 * FRAME - 0.01)  # the last two still play
    assert hearer.sounds.is_set() and hearer.over.is_set()


async def test_people_speak_hear_the_answer_out_and_pause() -> None:
    engine = FakeEngine([0.0] * 10)
    heard = await played(engine, manner(), lambda _: engine.count("ask") >= 3)
    times = [at for kind, at in engine.log if kind == "ask"]
    assert all(other - one > 10 * FRAME + people.PAUSE[0] + 0.05 for one, other in itertools.pairwise(times))
    assert heard.answers >= 2 and heard.underruns == heard.interrupted == 0
    assert [number for kind, number in engine.log if kind == "commit"][:2] == [1, 2]  # each before the next is asked
    (options,) = [options for kind, options in engine.log if kind == "session"]
    assert options["pace"] == "live" and options["overflow"] == "forget"


async def test_rows_that_speak_all_the_time_are_asked_again_at_once() -> None:
    engine = FakeEngine([0.0] * 100)  # two seconds of sound
    start = time.perf_counter()
    await played(engine, manner(nonstop=True), lambda _: engine.count("ask") >= 4)
    assert time.perf_counter() - start < 4


async def test_barge_ins_cut_the_answer_and_ask_again() -> None:
    engine = FakeEngine([FRAME * n for n in range(10)])
    how = manner(barge_in=1.0, answer_seconds=10 * FRAME)
    heard = await played(engine, how, lambda _: engine.count("ask") >= 3)
    assert heard.interrupted == engine.count("cancel") >= 2 and heard.answers == 0
    parts = [seconds / how.answer_seconds for kind, seconds in engine.log if kind == "cancel"]
    assert all(people.BARGE[0] - 1e-6 <= part < 1 for part in parts)


async def test_questions_from_before_it_is_measured_are_left_out() -> None:
    """Their sound counts, and how long it took to come does not."""
    engine = FakeEngine([0.15, 0.15, 0.2])

    load = LiveLoad(engine, manner(), 64)  # type: ignore[arg-type]
    load.invite(1)
    while engine.count("ask") < 1:
        await load.wait(0.002)
    heard = load.heard = PlayedAudio()
    while heard.answers < 1:
        await load.wait(0.002)
    load.heard = None
    await load.close()
    assert len(heard.lateness) == 2 and not heard.first_audio and not heard.questions


async def test_what_goes_wrong_in_a_call_is_raised() -> None:
    class Broken(FakeEngine):
        def session(self, **options: Any) -> Any:
            raise RuntimeError("the engine is gone")

    with pytest.raises(RuntimeError, match="gone"):
        await played(Broken([]), manner(), lambda _: False)


def checked(done: Any, numbers: list[int]) -> list[dict[str, Any]]:
    """The lines that a command printed as JSON."""
    assert done.code == 0, done.err
    found = json.loads(done.text)
    (table,) = found["tables"]
    assert found["processor"] in table["title"] and table["frame_seconds"] == 0.04
    assert [one["sessions"] for one in table["runs"]] == numbers
    for one in table["runs"]:
        assert set(one) == set(LiveFigures.__dataclass_fields__)
        assert one["engine_cpu"] > 0 and one["generator_cpu"] > 0 and one["errors"] == 0 and one["questions"] > 0
        assert set(one["lateness"]) == {"p50", "p95", "p99", "count"}
    return table["runs"]


class FakeProcess(FakeEngine):
    """What the command asks of an `EngineProcess`; its process is this one."""

    codec, frame_rate, decoding, pid = "codec2", 25.0, 0.0, os.getpid()
    shown = "SpeechLM(tiny)"

    def __init__(self, started: dict[str, Any]) -> None:
        super().__init__([0.0] * 5)
        self.started = started

    def call(self, name: str, *given: Any) -> Any:
        self.log.append((name, given))
        if name == "engine.measure":
            assert self.open == 0
            return StepCosts({rows: StepCost(1e-3 * rows, 1e-3 * rows) for rows in given[0]})
        return EngineStats(active=1, steps=10, rows=1.0) if name == "engine.stats" else None

    def __enter__(self) -> FakeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.log.append(("closed", None))


def test_the_command_plays_sessions_and_draws_the_curve(
    folder: Path, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[FakeProcess] = []

    def start(place: str, **values: Any) -> FakeProcess:
        made.append(FakeProcess({"folder": place, **values}))
        return made[-1]

    monkeypatch.setattr("infer.bench.live.EngineProcess", start)
    cpu = lambda process: (time.process_time(), 0.0)  # noqa: E731 -- the system counts in 10 ms
    monkeypatch.setattr("psutil.Process.cpu_times", cpu)
    words = ("--sessions", "3", "--json", "--plot", "curve.png", "--quantize", "int8", "--dtype", "float32")
    short = ("--seconds", "0.05", "--answer_seconds", "0.1", "--play_seconds", "0.3", "--threads", "1")
    (found,) = checked(run("bench", "--model", folder, *words, *short), [3])
    assert found["lateness"]["count"] > 0 and found["answers"] > 0
    assert found["overhead"] == pytest.approx(found["engine_cpu"] * found["seconds"] / 10 / 1e-3)
    (engine,) = made
    wanted = {"slots": 3, "threads": 1, "quantize": "int8", "dtype": "float32", "device": "cpu", "kernels": "fast"}
    assert wanted.items() <= engine.started.items()
    assert [given for name, given in engine.log if name == "engine.measure"] == [([1, 2, 3],)]
    assert engine.log[-1][0] == "closed" and (tmp_path / "curve.png").is_file()


@pytest.mark.long
def test_an_engine_in_its_process_is_played(folder: Path, run: Any, tmp_path: Path) -> None:
    words = ("--sessions", "2,1", "--barge_in", "0.5", "--json", "--quantize", "int8")
    short = ("--seconds", "0.1", "--answer_seconds", "0.3", "--play_seconds", "2")
    runs = checked(run("bench", "--model", folder, *words, *short), [1, 2])
    for one in runs:
        assert one["lateness"]["count"] > 0 and one["step"]["p99"] > 0 and one["overhead"] > 0
    assert sum(one["interrupted"] for one in runs) > 0
    done = run("bench", "--model", folder, "--sessions", "1", "--nonstop", *short)
    assert done.code == 0 and "nonstop" in done.text and "a frame plays 40 ms" in done.text and "…" not in done.text


@pytest.mark.long
def test_codecs_with_random_weights_are_there_for_the_engine_s_process(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(CODECS)
    plugins.load_plugins(["infer.bench.random_codecs"], "plugins")
    new = set(CODECS) - before
    try:
        assert new == {f"random-{name}" for name in before if CODECS.find(name).random} >= {"random-snac"}
        codec = load_codec("random-mimi")
        assert codec.name == "random-mimi" and codec.codebook_sizes == CODECS.find("mimi").codebook_sizes
    finally:
        for name in new:  # and away again after the test
            del CODECS[name], CODECS._sources[name]
        plugins._loaded.remove("infer.bench.random_codecs")
        del sys.modules["infer.bench.random_codecs"]


def figures(sessions: int, underruns: int = 0, late: float = -0.05) -> LiveFigures:
    few = Percentiles(late - 0.01, late, late, 2)
    return LiveFigures(
        loop="closed", sessions=sessions, seconds=1.0, lateness=few, first_audio=Percentiles(0.05, 0.05, 0.05, 1),
        underruns=underruns, active=1.0, rows=1.0, written=25.0, step=few, engine_cpu=0.5, generator_cpu=0.1, overhead=None,
        waiting=0.0, questions=0, answers=0, interrupted=0, errors=0,
    )  # fmt: skip


def largest(*runs: LiveFigures) -> int | None:
    return LiveTable("", 0.04, list(runs)).largest_without_underrun()


def test_the_largest_number_is_the_last_before_the_first_gap() -> None:
    assert largest(figures(1), figures(4), figures(8, underruns=1), figures(16)) == 4
    assert largest(figures(1, underruns=3)) is None and largest(figures(1), replace(figures(2), errors=1)) == 1
    quiet = replace(figures(1), first_audio=Percentiles())
    assert largest(quiet) is None and largest(quiet, figures(2)) == 2


def test_the_curve_has_every_line_and_the_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, **_: (drawn.append(figure), file.touch()))
    runs = [figures(n, underruns=n > 4, late=0.01 * (n - 5)) for n in (1, 4, 16)]
    draw(LiveTable("nano", 0.04, runs), tmp_path / "x.png")
    late, step, first = drawn[0].axes
    lines = {line.get_label(): list(line.get_ydata()) for line in late.lines}
    assert lines["p99"] == pytest.approx([1e3 * run.lateness.p99 for run in runs])  # type: ignore[operator]
    assert {"p50", "p95", "p99", "due", "4 without underrun"} == set(lines) and lines["due"] == [0, 0]
    assert any(line.get_ydata()[0] == 40.0 for line in step.lines)  # a frame
    assert late.get_xscale() == "log" and [label.get_text() for label in first.get_xticklabels()] == ["1", "4", "16"]


def test_a_line_of_the_table_has_every_column(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(cells(figures(4))) == len(COLUMNS)
    LiveTable("live sessions: nano", 0.04, [figures(4)]).show()
    out = capsys.readouterr().out
    assert "-60 -50 -50" in out and "a frame plays 40 ms" in out and max(map(len, out.splitlines())) <= 132


MISTAKES = {
    "none": (("--sessions", "0"), "--sessions '0': '0' is no number of sessions; give numbers from 1 to 1024"),
    "too many": (("--sessions", "2000"), "give numbers from 1 to 1024"),
    "no folder": (("--sessions", "1", "--plot", "none/x.png"), "there is no folder"),
    "a name": (("--sessions", "1", "--plot", "x.jpg"), "is no name of a PNG file; end it in .png"),
    "two pictures": (("--sessions", "1", "--plot", "x.png", "--preset", "nano,qwen3-0.6b"), "--plot draws one model"),
    "alone": (("--plot", "x.png"), "--plot is for live sessions"),
    "nonstop alone": (("--nonstop",), "--nonstop is for live sessions"),
    "a long answer": (("--sessions", "1", "--answer_seconds", "3000"), "do not fit the model's context of"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_before_anything_is_started(name: str, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.bench.live.EngineProcess", lambda *_, **__: pytest.fail("an engine was started"))
    monkeypatch.setattr("infer.bench.live.random_model", lambda *_, **__: pytest.fail("a model was made"))
    words, said = MISTAKES[name]
    done = run("bench", *words)
    assert done.code == 2 and not done.out and said in done.err and done.err.count("\n") == 1, done.err


def test_more_than_fit_in_memory_are_refused_before_it_is_taken(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.bench.live.random_model", lambda *_, **__: pytest.fail("a model was made"))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1 << 24))
    done = run("bench", "--sessions", "1,512")
    assert done.code == 2 and "--sessions 1,512: the cache of 512 rows" in done.err and "play fewer" in done.err


def test_a_model_without_its_codec_is_refused(run: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.bench.live.EngineProcess", lambda *_, **__: pytest.fail("an engine was started"))
    shutil.copytree(folder, tmp_path / "mute")
    config = json.loads((folder / "config.json").read_text())
    config["model"] |= {"codec": "snac", "layout": to_dict(Layout.build([4096] * 7, 300))}
    (tmp_path / "mute" / "config.json").write_text(json.dumps(config))
    done = run("bench", "--model", tmp_path / "mute", "--sessions", "1")
    assert done.code == 2 and "no weights of the codec 'snac'" in done.err and "mute/codec" in done.err
