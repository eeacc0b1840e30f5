"""The pairs that must stay equal, one test each: what is compiled against the tensors or modules it is for, on random states.

Attention's is `test_shared.test_it_is_attention`; a whole step's, `test_step.test_a_compiled_step_is_the_modules`.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from omni.cpu import compiled
from omni.generate.rows import RowState, StepPlan
from omni.generate.sampling import Mode
from omni.model.blocks import RMSNorm, rope_table, rotate
from omni.model.kv_cache import KVCache
from tests.generate.conftest import LAYOUTS

ROWS = 300


@pytest.fixture(params=range(3))
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    return torch.Generator().manual_seed(request.param)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("resting", [False, True])
def test_cursor_push(name: str, resting: bool, rng: torch.Generator) -> None:
    """`compiled.push` writes what `Cursor.push` and the step's tensors give, of rows at any place of an answer."""
    layout, bits = LAYOUTS[name], lambda *shape: torch.rand(shape, generator=rng) < 0.4
    state: Any = RowState(layout, ROWS, torch.device("cpu"))
    cursor, (ends, *_) = state.cursor, state.cursor.constants
    ids = torch.stack([torch.randint(s.vocabulary, (ROWS,), generator=rng) for s in layout.streams], 1)
    sampled = torch.where(bits(*ids.shape), ends, ids)
    cursor.step[:] = torch.randint(9, (ROWS,), generator=rng)
    for flag in (cursor.text_active, cursor.audio_active, cursor.text_ended, state.resting):
        flag[:] = bits(ROWS)
    cursor.done[:] = bits(ROWS) & bits(ROWS)
    cursor.audio_end[:] = torch.where(bits(ROWS), torch.randint(9, (ROWS,), generator=rng), cursor.audio_end)
    cursor.history[:] = torch.randint(9, cursor.history.shape, generator=rng)
    state.position[:], state.column[:] = torch.randint(99, (ROWS,), generator=rng), ids.flip(0)
    plan = StepPlan(tuple(range(ROWS)), (), (), False, resting, Mode(), Mode(), 1)
    other, nonfinite = copy.deepcopy(state), bits(2, ROWS)
    for rows in (slice(0, 200), torch.arange(250, ROWS, 3)):
        state._push(plan, rows, sampled[rows].numpy(), nonfinite[:, rows].numpy())
        other._push_tensors(plan, rows, sampled[rows], nonfinite[:, rows])
    fed = ~state.resting if resting else torch.ones(ROWS, dtype=torch.bool)
    assert all(one.equal(two) for one, two in zip(state._carried(), other._carried(), strict=True))
    assert state.packed[fed].equal(other.packed[fed]) and state.packed[fed].any(0).all()


@pytest.mark.parametrize(("window", "length"), [(None, 40), (5, 40), (7, 9)])
def test_mask_and_slots(window: int | None, length: int, rng: torch.Generator) -> None:
    """`KVCache.write_slots_and_mask` notes and shows what `begin_forward` does, of a window and a ring too."""
    first, second = (KVCache(1, 8, length, 1, 4, window=window, chunk=3) for _ in range(2))
    for rows in ([*range(8)], [5, 2, 7], [1, 2, 3], [*range(8)]):
        for cache in (first, second):
            held = torch.randint(length, cache.positions.shape, generator=torch.Generator().manual_seed(len(rows)))
            cache.positions[:] = held.masked_fill(held % 3 == 0, -1)
        now = torch.randint(-1, length, (len(rows), 1), generator=rng)
        one, two = (cache.select(rows).limit(length - 1) for cache in (first, second))
        added, shown = one.write_slots_and_mask(now), two.begin_forward(now)
        assert first.positions.equal(second.positions) and one.writes.equal(two.writes)
        awake = now[:, 0] >= 0  # a row that rests sees all by the mask of the modules; its result is not used
        assert (added == 0)[awake].equal(shown[awake]) and added[added != 0].eq(-torch.inf).all()


def test_norm(rng: torch.Generator) -> None:
    """`compiled.norm_rows` is `RMSNorm`."""
    for width in (1, 7, 32, 896):
        norm, x = RMSNorm(width, eps=1e-6), torch.randn(9, width, generator=rng) * torch.logspace(-4, 4, 9)[:, None]
        torch.nn.init.normal_(norm.weight, 1, 0.3, rng)
        out = np.empty((9, width), np.float32)
        compiled.norm_rows(x.numpy(), norm.weight.numpy(force=True), np.float32(1e-6), out)
        torch.testing.assert_close(torch.from_numpy(out), norm(x), rtol=1e-5, atol=1e-6)


def test_rope(rng: torch.Generator) -> None:
    """`compiled.rope_cos_sin` and `rotate_and_keep` are `rope_table` and `rotate`; keys and values go to their slots."""
    positions, frequencies = torch.randint(4096, (9,), generator=rng), torch.logspace(0, -4, 8)
    cos, sin = (np.empty((9, 16), np.float32) for _ in range(2))
    compiled.rope_cos_sin(positions.numpy(), frequencies.numpy(), cos, sin)
    table = rope_table(frequencies, positions[:, None])
    for ours, wanted in zip((cos, sin), table, strict=True):
        torch.testing.assert_close(torch.from_numpy(ours), wanted[:, 0, 0], rtol=1e-5, atol=1e-6)
    heads, keys, values = torch.randn(9, 4 + 2 * 2, 16, generator=rng), *torch.zeros(2, 9, 3, 2, 16)
    wanted, none = rotate(heads[:, None, :6], *table)[:, 0], np.empty(0, np.float32)
    for b, t in enumerate(turned := heads.clone().numpy()):
        compiled.rotate_and_keep(t, 4, b, 1, cos[b], sin[b], np.float32(0), none, none, keys.numpy(), values.numpy())
    torch.testing.assert_close(torch.from_numpy(turned[:, :6]), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(keys[:, 1], wanted[:, 4:], rtol=1e-5, atol=1e-5)
    assert values[:, 1].equal(heads[:, 6:]) and not keys[:, 0].any() and not values[:, 2].any()
