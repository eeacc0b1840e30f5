"""Laws of a step's state: what is compiled for a CPU is what the tensors of any device do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni.generate.options import GREEDY
from omni.generate.rows import RowState, Start, StepPlan
from omni.generate.sampling import Mode
from omni.layout import Cursor, Layout, Stream
from tests.generate.conftest import LAYOUTS

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
