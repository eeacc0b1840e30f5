"""Rows in pieces: the order is that of lists made by hand, and an epoch has each row once, by any number of packers."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest

from tests.train.data.toys import MODELS, ToySource, codec_of
from train.data.seeding import Windows, shuffled, shuffled_all
from train.data.sources import mixture as shares
from train.data.sources.mixture import Draw, Mixture, UsedUp

CODEC = codec_of(MODELS["codec2"])
SIZES = {
    "alike": [4] * 9,
    "one": [5],
    "a row": [1],
    "ends of files": [4, 4, 4, 1, 4, 4, 3, 4, 4, 4, 4, 2],
    "all sorts": [1, 7, 2, 2, 5, 3, 1, 9, 2],
    "empty ones": [0, 0, 3, 0, 3, 0, 0, 0, 2, 3, 0],
}


def windows(sizes: list[int], width: int) -> Windows:
    return Windows(np.cumsum([0, *sizes]), width)


def piece_of(sizes: list[int], row: int) -> int:
    return next(piece for piece in range(len(sizes)) if row < sum(sizes[: piece + 1]))


def listed(sizes: list[int], width: int, packers: int, epoch: tuple[int | str, ...]) -> list[list[tuple[int, int]]]:
    """Row and window of each draw of an epoch, by packer: all pieces in a list, cut into windows, and those into runs."""
    order = [shuffled(i, len(sizes), *epoch, "pieces") for i in range(len(sizes))]
    rows = [(sum(sizes[:piece]) + i, slot // width) for slot, piece in enumerate(order) for i in range(sizes[piece])]
    runs, start = [], 0
    for packer in range(packers):
        end = start + (len(rows) - packer + packers - 1) // packers
        run = []
        while start < end:
            size = sum(window == rows[start][1] for _, window in rows[start:end])
            run += [(rows[start + shuffled(i, size, *epoch, "window", start)][0], start) for i in range(size)]
            start += size
        runs.append(run)
    return runs


@pytest.mark.parametrize("width", [1, 3, 99])
@pytest.mark.parametrize("packers", [1, 3, 8])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_rows_are_those_of_lists_and_each_comes_once(sizes: list[int], packers: int, width: int) -> None:
    order, count = windows(sizes, width), sum(sizes)
    for epoch in ((3, "epoch", 0), (3, "epoch", 1)):
        wanted = listed(sizes, width, packers, epoch)
        found = [order.find(place, packers, *epoch) for place in range(count)]
        assert [found[packer::packers] for packer in range(packers)] == wanted
        assert sorted(row for row, _ in found) == list(range(count))
        anyhow = random.Random(0).sample(range(count), count)
        assert [windows(sizes, width).find(place, packers, *epoch) for place in anyhow[:9]] == [found[p] for p in anyhow[:9]]
    if count > 9:
        assert found != [order.find(place, packers, 3, "epoch", 0) for place in range(count)]


@pytest.mark.parametrize("packers", [1, 3])
def test_a_window_has_so_many_pieces_which_no_other_has(packers: int) -> None:
    sizes = SIZES["ends of files"] * 5
    order = windows(sizes, 4)
    found = [order.find(place, packers, 0) for place in range(order.rows)]
    seen = Counter()
    for packer in range(packers):
        run = found[packer::packers]
        assert [start for _, start in run] == sorted(start for _, start in run)
        of = [{piece_of(sizes, row) for row, start in run if start == one} for one in dict.fromkeys(start for _, start in run)]
        assert max(map(len, of)) == 4 and all(len(pieces) == 4 for pieces in of[1:-1])
        seen.update(piece for pieces in of for piece in pieces)
    assert len(seen) == 60 and seen.total() <= 60 + 4 * (packers - 1)
    assert len({piece_of(sizes, row) for row, _ in found[:8]}) > 2  # rows of a window are mixed


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 100, 1023, 1024, 70_000])
def test_all_at_once_are_shuffled_as_one_by_one(size: int) -> None:
    found = shuffled_all(size, 7, "x")
    some = range(size) if size < 2000 else random.Random(0).sample(range(size), 500)
    assert [found[i] for i in some] == [shuffled(i, size, 7, "x") for i in some]
    assert sorted(found.tolist()) == list(range(size)) and shuffled_all(0, 7).tolist() == []
    assert size < 16 or ((found != shuffled_all(size, 7, "y")).any() and found.tolist() != list(range(size)))


def mixture(weights: tuple[float, ...], size: int = 31, seed: int = 5) -> Mixture:
    """Sources of which the last is read in pieces, the first is endless, and those between have 9 rows."""
    sizes = [None, 9][: len(weights) - 1]
    sources = [ToySource(f"toy{i}", n, CODEC) for i, n in enumerate((*sizes, size))]
    return Mixture(sources, weights, seed, windows={len(weights) - 1: windows([4] * (size // 4) + [size % 4], 3)})


@pytest.mark.parametrize("packers", [1, 4])
@pytest.mark.parametrize("weights", [(1.0,), (0.0, 1.0), (2, 1, 1), (1, 3)])
def test_epochs_and_shares_of_a_mixture_are_exact(
    weights: tuple[float, ...], packers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "BLOCK", 64)
    mixed, groups = mixture(weights), len(weights) - 1
    draws = [mixed.draw(number, packers) for number in range(192 * packers)]
    counts = Counter(draw.source for draw in draws)
    for source, weight in enumerate(weights):
        assert abs(counts[source] - len(draws) * weight / sum(weights)) <= packers * len(weights)
    for source in {groups, 1} - {0} & set(range(len(weights))):
        size, mine = mixed.sources[source].size, [[] for _ in range(packers)]
        for draw in draws:
            if draw.source == source:
                mine[draw.number % packers].append(draw)
        dealt = [draw for several in zip(*mine, strict=False) for draw in several]  # the order that epochs count in
        for first in range(0, len(dealt) - size, size):
            assert sorted(draw.index for draw in dealt[first : first + size]) == list(range(size))
    for packer in range(packers):
        seen = [draw.source_draw.window for draw in draws[packer::packers] if draw.source == groups]
        assert seen == sorted(seen)  # a window does not come again
    assert all(draw.index == draw.number for draw in draws if draw.source == 0 and groups)


@pytest.mark.parametrize("packers", [1, 3, 40])
def test_limits_and_schedules_hold_over_all_packers(packers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "BLOCK", 64)
    rising = ((0, 1.0), (240, 0.0), (480, 4.0))
    sources = [ToySource(f"toy{i}", n, CODEC) for i, n in enumerate((9, 31))]
    mixed = Mixture(sources, [1.0, rising], 5, [25, 62], {1: windows([4] * 7 + [3], 3)})
    draws: list[list[Draw]] = [[] for _ in range(packers)]
    for packer, mine in enumerate(draws):
        with pytest.raises(UsedUp):
            for own in range(1000):
                mine.append(mixed.draw(packer + packers * own, packers))
        with pytest.raises(UsedUp):
            mixed.check(packer + packers * len(mine), packers)
    given = [draw for mine in draws for draw in mine]
    assert Counter(draw.index for draw in given if draw.source == 1) == dict.fromkeys(range(31), 2)
    counts = Counter(draw.index for draw in given if draw.source == 0)
    assert sum(counts.values()) == 25 and set(counts.values()) == {2, 3}
    whole = Mixture(sources, [1.0, rising], 5, [25, 62], {1: windows([4] * 7 + [3], 3)})
    assert [whole.draw(draw.number, packers) for draw in reversed(given)] == given[::-1]


@pytest.mark.parametrize("packers", [1, 4])
def test_shares_of_a_schedule_are_counted_over_all_packers(packers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "BLOCK", 64)
    sources = [ToySource(f"toy{i}", n, CODEC) for i, n in enumerate((9, 31))]
    mixed = Mixture(sources, [1.0, ((0, 1.0), (2560, 0.0))], 5, windows={1: windows([4] * 7 + [3], 3)})
    given = [mixed.draw(number, packers).source for number in range(3072)]
    assert abs(given[:2560].count(0) - 2560 * math.log(2)) <= 2 * packers  # the integral of 1 / (2 - x)
    assert given[2560:] == [0] * 512
