"""The path that a GPU takes, with stand-ins for CUDA's streams, events and graphs: results are read one step late, and each
shape of a step is rehearsed and captured before it is replayed. What is said must be what the plain path says."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from omni.edit.deltas import Delta, Edits
from omni.generate.options import GREEDY
from omni.generate.results import AudioChunk, TextDelta
from omni.generate.rows import Start
from omni.generate.runner import Runner
from omni.generate.sampling import Sampling, per_stream
from omni.generate.speech_lm import SpeechLM
from omni.layout import Layout
from omni.lora.attach import Adapters, activate, adapted, add_adapter, remove_adapter
from omni.lora.config import LoRAConfig
from omni.model.linears import linears_of
from omni.model.speech_model import SpeechModel
from omni.utils import hardware
from tests.generate.conftest import LAYOUTS, make_lm, tone
from tests.generate.session_toys import inside
from tests.generate.test_runner import begin
from tests.soon import soon

TURNS: list[tuple[Any, str]] = [(tone(0.3), "A1A2"), ("and then?", "T1A2"), ("hm", "T1T2"), ("say", "T1A1")]
SAMPLINGS = [GREEDY, Sampling(1.0, top_k=40, repetition_penalty=1.2)]


class Graph:
    """Replays by running the captured step again, with the pairs that its linears had when it was captured."""

    capturing: Graph | None = None
    pools: ClassVar[dict[int, weakref.WeakSet[Graph]]] = {}
    run: Any = None
    model: SpeechModel
    hooks: dict[str, Any]

    def capture(self, model: SpeechModel, run: Any) -> None:
        self.model, self.run, self.hooks = model, run, {}
        for name, part in adapted(model).items():
            frozen = Adapters(replace(part.active))
            frozen._modules, frozen.attached = dict(part._modules), part.attached
            self.hooks[name] = frozen

    def replay(self) -> None:
        kept = {}
        for name, linear in linears_of(self.model).items():
            frozen, kept[name] = self.hooks.get(name), linear._forward_hooks
            linear._forward_hooks = OrderedDict()
            if frozen is not None:
                linear.register_forward_hook(partial(add, frozen))
        self.run()
        for name, hooks in kept.items():
            linears_of(self.model)[name]._forward_hooks = hooks


def add(frozen: Adapters, linear: Any, args: Any, out: Tensor) -> Tensor:
    delta = frozen(args[0])
    return out if delta is None else out + delta


HERE = threading.local()
"""The device that is current in a thread, if any is."""


class Nothing:
    """A stream or an event; it belongs to the device that is current when it is made."""

    homeless = 0

    def __init__(self) -> None:
        Nothing.homeless += getattr(HERE, "device", None) is None

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
        if Graph.capturing is not None and Graph.capturing is getattr(HERE, "graph", None):
            Graph.capturing.capture(self.model, lambda: forward(self, plan))
        forward(self, plan)

    @contextmanager
    def current_device(device: torch.device) -> Any:
        HERE.device = device
        yield
        HERE.device = None

    @contextmanager
    def graph(g: Graph, pool: int, stream: Nothing, capture_error_mode: str) -> Any:
        assert Graph.capturing is None, "one capture at a time"
        assert stream in rehearsed, "another stream than the rehearsals'"
        assert Graph.pools.setdefault(pool, weakref.WeakSet([g])), "a pool that no graph uses any more"
        Graph.capturing = HERE.graph = g
        try:
            yield
        finally:
            Graph.capturing = HERE.graph = None
        Graph.pools[pool].add(g)

    @contextmanager
    def stream(one: Nothing) -> Any:
        rehearsed.add(one)
        yield

    rehearsed: set[Nothing] = set()
    handles = itertools.count()
    Graph.pools.clear()

    monkeypatch.setattr(Runner, "__init__", watched_init)
    monkeypatch.setattr(Runner, "_forward", watched_forward)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    for name, stand_in in {
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: next(handles),
        "Stream": Nothing,
        "Event": Nothing,
        "current_stream": Nothing,
        "stream": stream,
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
        said.append(session.ask("go on", "T1A2").answer().tokens)
    with lm.session(context=24, text_assist=assist) as session:
        answer = session.ask("hello", "T1A2").answer()
        said.append((answer.ended, answer.tokens, answer.timings.steps))
    return said


def batch(lm: SpeechLM, sampling: Sampling) -> list[Any]:
    answers = lm.generate(
        [q for q, _ in TURNS * 2], [t for _, t in TURNS * 2], sampling=sampling, max_seconds=0.5, max_tokens=30
    )
    return [(a.tokens, a.ended, a.codes is not None and a.codes.tolist()) for a in answers]


@pytest.mark.sampled(1)
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
    soon(lambda: not any(runner._records._pending for runner in runners))  # an answer's last step is read when nobody asks
    assert all(sum(map(len, runner._records._hosts.values())) <= 3 and not runner._records._pending for runner in runners)


def test_results_are_one_step_late_and_a_rehearsal_writes_nothing(layout: Layout, as_if_on_a_gpu: list[Runner]) -> None:
    """Capturing a step takes some steps before it; cache and rows must not notice."""
    lm = make_lm(layout)
    with lm.session(max_tokens=20) as session:
        list(session.ask("hello", "T1T2"))  # 8 columns
        (runner,) = as_if_on_a_gpu
        assert inside(session)._last is not None
        steps = int(runner.state.cursor.step[0])
        assert steps == len(inside(session)._last.reply.columns) + 1
        assert int((runner.cache.positions[0] >= 0).sum()) == 8 + steps - 1


@pytest.mark.long
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
        assert {a.ended for a in lm.generate(["hello"] * 8, "T1A2")} == {"error"}
        down.copy_(kept)
    for runner in as_if_on_a_gpu:
        for values in runner.cache.values:
            values.fill_(float("nan"))
    assert (talk(lm, SAMPLINGS[1], True), batch(lm, SAMPLINGS[1])) == expected


@pytest.mark.long
def test_streams_and_events_are_made_on_the_model_s_device(layout: Layout, as_if_on_a_gpu: list[Runner]) -> None:
    Nothing.homeless = 0
    lm = make_lm(layout)
    talk(lm, GREEDY, assist=True)
    batch(lm, GREEDY)
    lm.engine.close()
    assert Nothing.homeless == 0 and getattr(HERE, "device", None) is None
    assert torch.cuda.Event() is not None and Nothing.homeless == 1  # and it would have been counted


def answers(lm: SpeechLM, turns: slice = slice(1, 3), **options: Any) -> list[Any]:
    with lm.session(max_seconds=0.3, max_tokens=6, **options) as session:
        return [session.ask(question, task).answer().tokens for question, task in TURNS[turns]]


def adapter(model: SpeechModel, seed: int) -> None:
    add_adapter(model, LoRAConfig(("decoder.blocks.*",), rank=2), "x")
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".lora." in name:
                p.copy_(torch.randn(p.shape, generator=g))


CHANGES: list[Callable[[SpeechModel], None]] = [
    lambda model: activate(model),
    lambda model: activate(model, "x"),
    lambda model: remove_adapter(model, "x"),
    lambda model: adapter(model, 2),
]


@pytest.mark.long
def test_a_change_of_adapters_drops_the_graphs(as_if_on_a_gpu: list[Runner]) -> None:
    """Answers are those of a model that changed before its first step."""
    lm, plain = make_lm(LAYOUTS["pad"]), make_lm(LAYOUTS["pad"])
    for each in (lm, plain):
        adapter(each.model, 1)
    for change in [lambda model: None, *CHANGES]:
        change(lm.model), change(plain.model)
        assert answers(lm) == answers(SpeechLM(plain.model, plain.tokenizer, plain.codec))
    assert as_if_on_a_gpu[0]._graphs


def test_sessions_with_edits_one_after_another_take_a_pool_that_is_in_use(as_if_on_a_gpu: list[Runner]) -> None:
    """All graphs of the last session go with its edits; the pool that they were in can take no other."""
    lm = make_lm(LAYOUTS["pad"])
    width = lm.config.decoder.width
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        edits = Edits({"decoder.blocks.1.mlp.gate": Delta(torch.randn(2, 48, generator=g), torch.randn(2, width, generator=g))})
        with lm.session(edits=edits, max_tokens=6) as session:
            session.ask("hello", "T1T2").answer()
    assert len(Graph.pools) == 3 and len({id(runner) for runner in as_if_on_a_gpu}) == 1


def test_captures_of_several_threads_meet_neither_each_other_nor_a_wait(
    as_if_on_a_gpu: list[Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in refuses a second capture; a wait for the whole device while one runs would break it."""
    lm, met = make_lm(LAYOUTS["pad"]), []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: met.append(Graph.capturing))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    over = threading.Event()

    def wait_again_and_again() -> None:
        while not over.wait(0.002):
            hardware.synchronize(torch.device("cuda"))

    waiter = threading.Thread(target=wait_again_and_again)
    waiter.start()
    with ThreadPoolExecutor(4) as pool:
        said = list(pool.map(lambda _: answers(lm), range(4)))
    over.set()
    waiter.join()
    assert len(met) > 3 and not any(met) and all(one == said[0] for one in said)


def test_a_capture_that_fails_leaves_the_rows_as_they_were(
    as_if_on_a_gpu: list[Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = make_lm(LAYOUTS["pad"])
    forward, calls = Runner._forward, []

    def failing(self: Runner, plan: Any) -> None:
        calls.append(plan)
        forward(self, plan)
        if len(calls) in (2, 6):  # in the second rehearsal, and then in the capture
            raise RuntimeError("lost")

    runner = Runner(lm.model, 1, 60)
    begin(runner, [1])
    state = [runner.state.position, runner.state.cursor.done, runner.state.cursor.step, runner.state.column]
    held = [tensor.clone() for tensor in state]
    monkeypatch.setattr(Runner, "_forward", failing)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="lost"):
            runner.step()
        assert all(map(torch.equal, state, held)) and not len(runner._graphs)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("assist", [False, True])
def test_what_was_warmed_up_is_not_captured_in_speech(assist: bool, as_if_on_a_gpu: list[Runner]) -> None:
    lm = make_lm(LAYOUTS["pad"], context=600)
    settings = per_stream(lm.layout, SAMPLINGS[1])
    starts = [Start(True, True, 0, settings)]
    if assist:
        starts = [replace(starts[0], partner=1), replace(starts[0], audio=False)]
    expected = answers(SpeechLM(lm.model, lm.tokenizer, lm.codec), slice(1, 2), sampling=SAMPLINGS[1], text_assist=assist)
    runner = lm.engine._batch.runner = Runner(lm.model, len(starts), 4096)
    lm.engine._batch.slots.holders += [None] * len(starts)
    assert runner.warm_up(starts) >= 6 and runner.warm_up(starts) == 0
    captured = len(runner._graphs)
    assert answers(lm, slice(1, 2), sampling=SAMPLINGS[1], text_assist=assist) == expected and len(runner._graphs) == captured
    assert len(as_if_on_a_gpu) == 2


def test_a_batch_that_shrinks_row_by_row_takes_few_graphs(as_if_on_a_gpu: list[Runner]) -> None:
    lm = make_lm(LAYOUTS["pad"])
    lm.generate([f"{'long ' * n}question" for n in range(13)], "T1T2", max_tokens=20, batch_size=13)
    (runner,) = as_if_on_a_gpu
    assert {len(plan.slots) for plan in runner._graphs} <= {1, 2, 4, 8, 13}
