"""The step runner and prefill against plain forwards over everything said so far, and compiled rows against tensors."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from omni.generate.options import GREEDY
from omni.generate.rows import RowState, RunnerRow, Start, StepOutput, StepPlan
from omni.generate.runner import Fork, Runner, pack, prefill
from omni.generate.sampling import Mode, Sampling, per_stream, seed_key
from omni.layout import Cursor, Layout, Stream
from omni.model.speech_model import SpeechModel
from omni.tasks import Columns, Turn, find_task, prompt
from tests.generate.conftest import LAYOUTS, last_logits, make_model

QUESTIONS = [("T1A2", b"how are you?"), ("T1T2", b"hi"), ("T1A1", b"read me"), ("T1A2", b"a much longer question")]


def ask(layout: Layout, which: int) -> Columns:
    task, text = QUESTIONS[which]
    return prompt(layout, Turn(task, question=tuple(text)))


def start(layout: Layout, which: int, sampling: Sampling = GREEDY) -> Start:
    task = find_task(QUESTIONS[which][0])
    length = len(ask(layout, which))
    return Start(task.text, task.audio, length - 1, per_stream(layout, sampling), seed_key(which))


def begin(runner: Runner, which: Sequence[int], first: int = 0, sampling: Sampling = GREEDY) -> list[RunnerRow]:
    layout = runner.layout
    packed = pack(layout, [ask(layout, i) for i in which], [])
    rows = range(first, first + len(which))
    hidden = prefill(runner.model, runner.cache, rows, packed, runner.chunk)
    return runner.begin(rows, hidden, [start(layout, i, sampling) for i in which])


def slow(model: SpeechModel, which: int, steps: int) -> list[StepOutput]:
    """Greedy generation of one row by a plain forward over everything before each column."""
    layout, a = model.layout, model.layout.n_audio
    columns, allowed = ask(layout, which), layout.allowed()
    tokens, begun = columns.tokens, start(layout, which)
    cursor = Cursor.start(layout, [begun.text], [begun.audio])
    out: list[StepOutput] = []
    while len(out) < steps and not (out and out[-1].done):
        logits = last_logits(model, tokens, None, torch.full((tokens.shape[1],), -1))
        ids = [int(x.masked_fill(~allowed[k, : len(x)], float("-inf")).argmax()) for k, x in enumerate(logits)]
        cursor, push = cursor.push(torch.tensor([ids]))
        tokens = torch.cat([tokens, push.column.T], dim=1)
        frame = push.frame[0].tolist() if push.has_frame[0] else None
        text = int(push.text) if push.has_text[0] else None
        out.append(StepOutput(tuple(push.column[0].tolist()), frame, text, bool(push.done)))
    assert a == len(tokens) - 1
    return out


def collect(runner: Runner, said: dict[RunnerRow, list[StepOutput]], steps: int) -> dict[RunnerRow, list[StepOutput]]:
    """Step until every row has written `steps` columns, or is done."""
    while True:
        for row, written in runner.results():
            said.setdefault(row, []).append(written)
            if written.done or len(said[row]) == steps:
                runner.leave(row)
        if not any(runner.rows):
            return said
        runner.step()


SHAPES = {"full": {}, "window": {"window": 7}, "post": {"post_layers": 1, "qk_norm": True},
          "talker": {"post_layers": 1, "talker": True, "combine": "sum"}}  # fmt: skip


@pytest.fixture(params=SHAPES)
def model(request: pytest.FixtureRequest, layout: Layout) -> SpeechModel:
    return make_model(layout, **SHAPES[request.param])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("chunk", [3, 64])
def test_a_batch_equals_the_slow_way_row_by_row(model: SpeechModel, chunk: int) -> None:
    runner = Runner(model, 4, 80, chunk=chunk)
    said = collect(runner, {}, steps=25)
    assert said == {}
    rows = begin(runner, range(4))
    said = collect(runner, {}, steps=25)
    for which, row in enumerate(rows):
        assert said[row] == slow(model, which, 25)


@pytest.mark.sampled(3)
def test_hidden_states_do_not_depend_on_padding_or_chunks(model: SpeechModel) -> None:
    layout = model.layout
    for chunk in (1, 4, 5, 64):
        cache = model.make_cache(4, 64, chunk=min(chunk, 64))
        packed = pack(layout, [ask(layout, i) for i in range(4)], [])
        hidden = prefill(model, cache, range(4), packed, chunk)
        for i in range(4):
            with torch.no_grad():
                alone = model(ask(layout, i).tokens[None])
            torch.testing.assert_close(hidden.text[i, -1], alone.text[0, -1], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(hidden.audio[i, -1], alone.audio[0, -1], rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("length", [27, 64])  # 27: no room for the column that rides along
@pytest.mark.parametrize("chunk", [4, 5, 64])
@pytest.mark.parametrize("held", [0, 6])
def test_a_forked_prefill_equals_two(model: SpeechModel, length: int, chunk: int, held: int) -> None:
    layout = model.layout
    whole = ask(layout, 3)
    turn = Turn("T1T2", question=tuple(QUESTIONS[3][1]))
    other = prompt(layout, turn).tokens
    assert torch.equal(whole.tokens[:, :-1], other[:, :-1]) and not torch.equal(whole.tokens, other)
    two = model.make_cache(2, length, chunk=min(chunk, length))
    both = Columns(other, other, whole.feature_index)
    expected = prefill(model, two, range(2), pack(layout, [whole, both], []), chunk)

    cache = model.make_cache(2, length, chunk=min(chunk, length))
    if held:
        first = Columns(whole.tokens[:, :held], whole.targets[:, :held], whole.feature_index[:held])
        prefill(model, cache, range(1), pack(layout, [first], []), chunk)
    hidden = prefill(model, cache, (0,), pack(layout, [whole], [], [held]), chunk, Fork(1, other[:, -1]))
    for mine, theirs in zip(hidden, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert torch.equal(cache.positions, two.positions)
    seen = cache.positions >= 0
    for mine, theirs in zip((*cache.keys, *cache.values), (*two.keys, *two.values), strict=True):
        torch.testing.assert_close(mine[seen], theirs[seen], rtol=1e-4, atol=1e-5)


def test_heads_that_no_row_needs_are_skipped(monkeypatch: pytest.MonkeyPatch, layout: Layout) -> None:
    model, calls = make_model(layout), {"text": 0, "audio": 0}
    decoder = model.decoder
    for name in calls:
        head = getattr(decoder, f"{name}_logits")

        def counted(hidden: object, name: str = name, head: object = head) -> Tensor:
            calls[name] += 1
            return head(hidden)  # type: ignore[operator]

        monkeypatch.setattr(decoder, f"{name}_logits", counted)
    for which in range(3):
        calls |= {"text": 0, "audio": 0}
        runner = Runner(model, 1, 80)
        begin(runner, [which], sampling=Sampling(1.0))
        (said,) = collect(runner, {}, steps=50).values()
        words = [w.text is not None for w in said]
        text_columns = sum(words) + (not all(words))  # one more writes the end
        if QUESTIONS[which][0] == "T1A1":
            assert calls["text"] == 0 and calls["audio"] == len(said)
        elif QUESTIONS[which][0] == "T1T2":
            assert calls["text"] == len(said) and calls["audio"] == 0
        else:
            assert calls["text"] == min(text_columns, len(said)) and 0 < calls["audio"] <= len(said)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(4))
def test_rows_in_any_company_write_what_they_write_alone(model: SpeechModel, seed: int) -> None:
    """Rows in scattered slots, of which any are stepped while the others rest, in a cache that grows meanwhile."""
    draw = random.Random(seed)
    sampling = draw.choice([GREEDY, Sampling(1.0, top_k=6, repetition_penalty=1.3)])
    runner, layout = Runner(model, 6, 40), model.layout
    slots, which = draw.sample(range(6), 4), [draw.randrange(4) for _ in range(4)]
    said: dict[RunnerRow, list[StepOutput]] = {}
    rows = []
    for slot, question in zip(slots, which, strict=True):
        hidden = prefill(model, runner.cache, (slot,), pack(layout, [ask(layout, question)], []), 5)
        rows += runner.begin((slot,), hidden, [start(layout, question, sampling)])
        runner.step(draw.sample(rows, draw.randint(1, len(rows))))
    for step in range(40):
        for row, written in runner.results():
            said.setdefault(row, []).append(written)
        if step == 10:
            runner.grow(9, 80)
        going = [row for row in rows if not row.done and len(said[row]) < 12]
        if going:
            runner.step(draw.sample(going, draw.randint(1, len(going))))
    for question, row in zip(which, rows, strict=True):
        alone = Runner(model, 1, 60)
        begin(alone, [question], sampling=sampling)
        (expected,) = collect(alone, {}, steps=30).values()
        assert said[row] == expected[: len(said[row])] and len(said[row]) > 3


LATE = Layout((Stream("audio", 4, 5, 0), Stream("audio", 9, 5, 1), Stream("text", 6, 5, 3)))


@pytest.mark.parametrize("layout", [*LAYOUTS.values(), LATE])
@pytest.mark.parametrize("gathered", [False, True])
def test_what_is_compiled_is_what_the_tensors_do(layout: Layout, gathered: bool) -> None:
    """Of rows that speak, write and do both, whose streams end at any time, beside rows that rest and rows that are done."""
    generator = torch.Generator().manual_seed(0)
    count, slots = 12, (0, 3, 4, 7, 8, 11) if gathered else tuple(range(2, 10))
    states = [RowState(layout, count, torch.device("cpu")) for _ in "ab"]
    starts = [Start(i % 3 != 1, i % 3 != 2, 5 + i, (GREEDY,) * len(layout)) for i in range(count)]
    for state in states:
        state.begin(range(count), starts, [0] * count)
    ends, sizes = layout.ids("end"), torch.tensor([s.vocabulary for s in layout.streams])
    seen: dict[str, Any] = {"frames": 0, "texts": 0, "ends": 0, "broken": 0}
    for step in range(60):
        resting = step % 3 == 1
        plan = StepPlan(slots, (), (), False, resting, Mode(), Mode(), 0)
        rows = states[0].index(slots)
        sampled = (torch.rand(len(slots), len(layout), generator=generator) * sizes).long()
        ending = torch.rand(sampled.shape, generator=generator) < 0.04
        sampled = torch.where(ending, ends, torch.where(sampled == ends, 0, sampled))
        odd = torch.rand(2, len(slots), generator=generator) < 0.1
        stepped = {slot for slot in slots if torch.rand((), generator=generator) < 0.6}
        for state, push in zip(states, (states[0]._push, states[1]._push_tensors), strict=True):
            if resting:
                state.rest(slots, stepped)
            push(plan, rows, *((sampled.numpy(), odd.numpy()) if state is states[0] else (sampled, odd)))
        for name in Cursor.TENSORS:
            assert torch.equal(getattr(states[0].cursor, name), getattr(states[1].cursor, name)), (name, step)
        assert torch.equal(states[0].column, states[1].column) and torch.equal(states[0].position, states[1].position)
        used = [slot for slot in slots if not resting or slot in stepped]
        assert torch.equal(states[0].packed[used], states[1].packed[used])
        has_frame, _, has_text, done, _, _, broken = states[0].packed[used][:, -7:].sum(0).tolist()
        for name, value in zip(seen, (has_frame, has_text, done, broken), strict=True):
            seen[name] += value
    assert all(seen.values())
