"""What a step costs: measured with all rows and their sound, kept, and believed until the engine's own steps say more."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from omni.codec.base import CodecBatch
from omni.engine import stats as stats_module
from omni.engine.engine import Engine
from omni.engine.intake import admit
from omni.engine.stats import STEPS, Recorder, StepCost, StepCosts, costs_file, load_costs, measured_of, powers_to
from omni.generate.runner import Runner
from omni.generate.speech_lm import SpeechLM
from tests.generate.conftest import LAYOUTS, make_lm


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMNI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What is logged."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("omni.engine.stats").addHandler(handler)
    yield lines
    logging.getLogger("omni.engine.stats").removeHandler(handler)


@pytest.fixture
def lm() -> SpeechLM:
    return make_lm(LAYOUTS["pad"], context=120)


def test_costs_are_a_line_between_and_beyond_what_was_measured() -> None:
    costs = StepCosts({1: StepCost(1.0, 2.0), 4: StepCost(4.0, 5.0), 8: StepCost(6.0, 9.0)})
    assert [costs.at(rows).seconds for rows in (1, 2, 4, 6, 8, 12)] == [1.0, 2.0, 4.0, 5.0, 6.0, 8.0]
    assert costs.at(8).cpu == 9.0 and costs.at(9).cpu == 10.0
    assert StepCosts({2: StepCost(1.0, 1.0)}).at(6).seconds == 3.0  # no company is known that would be cheaper
    assert StepCosts({1: StepCost(2.0, 1.0), 2: StepCost(1.0, 1.0)}).at(2).seconds == 2.0  # more rows never take less
    assert [powers_to(n) for n in (1, 5, 8)] == [[1], [1, 2, 4, 5], [1, 2, 4, 8]]


def test_each_number_of_rows_is_stepped_and_decoded(lm: SpeechLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stepped: list[tuple[int, bool, bool]] = []
    decoded: list[int] = []
    warmed: list[int] = []
    step, push = Runner.step, CodecBatch.push

    def watched(self: Runner, rows: Any = None) -> None:
        stepped.append((len(rows), all(row.needs_text for row in rows), all(row.needs_audio for row in rows)))
        step(self, rows)

    monkeypatch.setattr(Runner, "step", watched)
    monkeypatch.setattr(Runner, "warm_up", lambda self, starts: warmed.append(len(starts)))
    monkeypatch.setattr(
        CodecBatch, "push", lambda self, streams, codes: decoded.append(len(codes)) or push(self, streams, codes)
    )
    engine = lm.start_engine(slots=3)
    found = engine.measure()
    wanted = [(rows, True, True) for rows in (1, 2, 3) for _ in range(STEPS + 2)]
    assert stepped == wanted and decoded == [rows for rows, *_ in wanted] and warmed == [1, 2, 3]
    assert set(found) == {1, 2, 3} and all(cost.seconds > 0 for cost in found.values())
    assert not any(engine.runner.rows)  # type: ignore[union-attr]


def test_measuring_changes_no_answer_and_ends_where_a_step_outlasts_a_frame(
    lm: SpeechLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = lm.generate("hello", "T1A2", max_seconds=0.5)
    costs = {1: StepCost(0.01, 0.01), 2: StepCost(0.5, 0.5)}
    for fixed in (4, None):
        engine = lm.start_engine(slots=fixed)
        engine.measure([1, 2, 4])
        assert torch.equal(lm.generate("hello", "T1A2", max_seconds=0.5).audio, wanted.audio)  # type: ignore[arg-type]
    engine = lm.start_engine(slots=4)
    monkeypatch.setattr(stats_module, "_measure", lambda runner, codec, starts, beside: costs[len(starts)])
    assert set(engine.measure()) == {1, 2}  # a frame plays 40 ms


def test_what_is_kept_is_read_by_engines_that_never_measured(lm: SpeechLM, place: Path) -> None:
    found = lm.start_engine(slots=2).measure()
    other = SpeechLM(lm.model, lm.tokenizer, lm.codec)
    assert other.engine.recorder.known == found
    more = lm.start_engine(slots=4).measure([4])
    assert set(more) == {4}
    assert load_costs() == {measured_of(lm.model, lm.codec): StepCosts({**found, **more})}
    assert Engine(lm.model).recorder.known is None  # of no codec nothing was measured
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert Engine(lm.model, codec=lm.codec).recorder.known is None
    finally:
        torch.set_num_threads(before)


def test_nobody_who_only_answers_measures(lm: SpeechLM, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats_module, "_measure", lambda *_: pytest.fail("measured"))
    lm.generate("hello", "T1A2", max_seconds=0.3)
    with lm.session(pace="live", max_seconds=0.3) as session:
        list(session.ask("hello", "T1A2"))
    assert not costs_file().exists()


BAD = {
    "no JSON": "{",
    "no measurement": json.dumps({"cpu": {"1": [1.0]}}),
}


@pytest.mark.parametrize("name", BAD)
def test_a_broken_file_is_left_out_with_a_line(name: str, lm: SpeechLM, told: list[str]) -> None:
    path = costs_file()
    path.parent.mkdir()
    path.write_text(BAD[name])
    assert lm.engine.recorder.known is None and lm.engine.recorder.known is None
    (line,) = told
    assert str(path) in line and "is left out: " in line and "engine.measure() replaces it" in line and "\n" not in line
    found = lm.engine.measure([1])
    assert load_costs()[measured_of(lm.model, lm.codec)] == found


@pytest.mark.cuda
def test_steps_of_measured_numbers_of_rows_are_captured(lm: SpeechLM) -> None:
    lm.model.cuda()
    engine = lm.start_engine(slots=4, context=100)
    engine.measure()
    runner = engine.runner
    assert runner is not None
    before = len(runner._graphs)
    lm.generate("hello", "T1A2", max_seconds=0.3)
    assert before and engine.runner is runner and len(runner._graphs) == before


def test_a_measurement_is_believed_until_the_engine_s_own_steps_say_more() -> None:
    recorder, other = Recorder(), Recorder()
    recorder.known = other.known = StepCosts({1: StepCost(0.005, 0.0), 21: StepCost(0.025, 0.0)})
    frame = 0.04  # of which 36 ms are for steps
    assert not admit(recorder, 30, frame)
    assert "a step of 33 rows takes 37 ms, a frame plays 40 ms" in admit(recorder, 32, frame)
    for rows in (1, 2) * 8:
        recorder.note(steps=[(rows, 0.0001 * rows)])  # of two rows nothing follows for 33
    assert admit(recorder, 32, frame) and not admit(recorder, 2, frame)
    for rows in (10, 17) * 300:
        recorder.note(steps=[(rows, 0.0001 * rows)])
    assert not admit(recorder, 32, frame) and not admit(recorder, 33, frame)
    assert admit(recorder, 34, frame)  # of 17 rows nothing follows for 35
    assert admit(other, 40, frame) and not admit(Recorder(), 40, frame)
