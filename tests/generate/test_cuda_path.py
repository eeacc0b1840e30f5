"""The path that a GPU takes, with stand-ins for CUDA's streams, events and graphs: results are read one step late, and each
shape of a step is rehearsed and captured before it is replayed. What is said must be what the plain path says."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from omni.generate.results import AudioChunk, TextDelta
from omni.generate.runner import Runner
from omni.generate.sampling import GREEDY, Sampling
from omni.generate.speech_lm import SpeechLM
from omni.layout import Layout
from tests.generate.conftest import LAYOUTS, make_lm, tone

TURNS: list[tuple[Any, str]] = [(tone(0.3), "A1A2"), ("and then?", "T1A2"), ("hm", "T1T2"), ("say", "T1A1")]
SAMPLINGS = [GREEDY, Sampling(1.0, top_k=40, repetition_penalty=1.2)]


class Graph:
    """Replays by running the captured step again."""

    capturing: Graph | None = None
    run: Any = None

    def pool(self) -> int:
        return 1

    def replay(self) -> None:
        self.run()


class Nothing:
    """A stream or an event; it belongs to the device that is current when it is made."""

    device: torch.device | None = None
    homeless = 0

    def __init__(self) -> None:
        Nothing.homeless += Nothing.device is None

    def wait_stream(self, other: Any) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@pytest.fixture
def as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Runner]:
    runners: list[Runner] = []
    init, forward = Runner.__init__, Runner._forward

    def watched_init(self: Runner, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self._cuda = self._graph = True
        runners.append(self)

    def watched_forward(self: Runner, plan: Any) -> None:
        if Graph.capturing is not None:
            Graph.capturing.run = lambda: forward(self, plan)
        forward(self, plan)

    @contextmanager
    def current_device(device: torch.device) -> Any:
        Nothing.device = device
        yield
        Nothing.device = None

    @contextmanager
    def graph(g: Graph, **kwargs: Any) -> Any:
        Graph.capturing = g
        yield
        Graph.capturing = None

    monkeypatch.setattr(Runner, "__init__", watched_init)
    monkeypatch.setattr(Runner, "_forward", watched_forward)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    for name, stand_in in {
        "CUDAGraph": Graph,
        "Stream": Nothing,
        "Event": Nothing,
        "current_stream": Nothing,
        "stream": contextmanager(lambda stream: iter([None])),
        "graph": graph,
        "device": current_device,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return runners


def talk(lm: SpeechLM, sampling: Sampling, assist: bool) -> list[Any]:
    said: list[Any] = []
    with lm.session(sampling=sampling, seed=3, max_seconds=0.6, max_tokens=14, text_assist=assist) as session:
        for question, task in TURNS:
            for event in session.ask(question, task):
                if isinstance(event, TextDelta):
                    said.append(event.text)
                elif isinstance(event, AudioChunk):
                    said.append(event.samples.tolist())
                else:
                    said.append((event.reason, event.timings.steps))
        list(session.ask(TURNS[1][0], TURNS[1][1]))
        session.cancel(played_seconds=0.1, shown_characters=2)
        said.append(session.answer("go on", "T1A2").tokens)
    with lm.session(context=24, text_assist=assist) as session:
        answer = session.answer("hello", "T1A2")
        said.append((answer.ended, answer.tokens, answer.timings.steps))
    return said


def batch(lm: SpeechLM, sampling: Sampling) -> list[Any]:
    answers = lm.generate_batch(
        [q for q, _ in TURNS * 2], [t for _, t in TURNS * 2], sampling=sampling, max_seconds=0.5, max_tokens=30
    )
    return [(a.tokens, a.ended, a.codes is not None and a.codes.tolist()) for a in answers]


@pytest.mark.parametrize(
    ("sampled", "assist", "window"),
    [
        pytest.param(*case, marks=() if sum(case) % 2 == 0 else pytest.mark.long)  # every two of them meet
        for case in itertools.product((False, True), repeat=3)
    ],
)
def test_captured_and_late_equals_plain(
    layout: Layout, sampled: bool, assist: bool, window: bool, request: pytest.FixtureRequest
) -> None:
    lm, sampling = make_lm(layout, **({"window": 9} if window else {})), SAMPLINGS[sampled]
    plain = talk(lm, sampling, assist), batch(lm, sampling)
    runners = request.getfixturevalue("as_if_on_a_gpu")
    twin = SpeechLM(lm.model, lm.tokenizer, lm.codec)
    assert (talk(twin, sampling, assist), batch(twin, sampling)) == plain
    assert runners and all(runner._graphs for runner in runners)
    assert all(len(runner._graphs) <= 12 for runner in runners)  # few shapes
    assert all(len(runner._hosts) <= 3 and not runner._pending for runner in runners)


def test_results_are_one_step_late(layout: Layout, as_if_on_a_gpu: list[Runner]) -> None:
    lm = make_lm(layout)
    with lm.session(max_tokens=20) as session:
        list(session.ask("hello", "T1T2"))
        (runner,) = as_if_on_a_gpu
        assert session._last is not None
        assert int(runner._cursor.step[0]) == len(session._last.reply.columns) + 1


@pytest.mark.parametrize("shape", [{}, {"window": 9}], ids=["full", "window"])
def test_a_captured_step_sees_nothing_of_a_slot_s_last_holder(shape: dict[str, Any], as_if_on_a_gpu: list[Runner]) -> None:
    """A graph that is replayed looks at what the host has cleared before; a row that breaks is noticed a step late."""
    lm = make_lm(LAYOUTS["pad"], **shape)
    expected = talk(lm, SAMPLINGS[1], True), batch(lm, SAMPLINGS[1])
    down = lm.model.decoder.blocks[0].mlp.down.weight
    kept = down.detach().clone()
    with torch.no_grad():
        down.fill_(1e30)
        assert lm.generate("hello", "T1A2", text_assist=True).ended == "error"
        assert {a.ended for a in lm.generate_batch(["hello"] * 8, "T1A2")} == {"error"}
        down.copy_(kept)
    for runner in as_if_on_a_gpu:
        for values in runner.cache.values:
            values.fill_(float("nan"))
    assert (talk(lm, SAMPLINGS[1], True), batch(lm, SAMPLINGS[1])) == expected


def test_streams_and_events_are_made_on_the_model_s_device(layout: Layout, as_if_on_a_gpu: list[Runner]) -> None:
    Nothing.homeless = 0
    lm = make_lm(layout)
    talk(lm, GREEDY, assist=True)
    batch(lm, GREEDY)
    lm.engine.close()
    assert Nothing.homeless == 0 and Nothing.device is None
    assert torch.cuda.Event().device is None and Nothing.homeless == 1  # and it would have been counted


def test_a_rehearsal_writes_nothing(layout: Layout, as_if_on_a_gpu: list[Runner]) -> None:
    """Capturing a step takes some steps before it; cache and rows must not notice."""
    lm = make_lm(layout)
    with lm.session(max_tokens=20) as session:
        list(session.ask("hello", "T1T2"))  # 8 columns
        (runner,) = as_if_on_a_gpu
        assert int((runner.cache.positions[0] >= 0).sum()) == 8 + int(runner._cursor.step[0]) - 1
