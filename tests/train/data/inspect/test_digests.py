"""Digests: what comes again is found exactly, however many there are; distinct ones are counted, or estimated as said."""

from __future__ import annotations

import errno
import os
import tempfile
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from omni.errors import UserError
from tests.train.data.inspect.test_validate import found
from tests.train.data.inspect.toys import row, stored
from train.data.inspect import digests as module
from train.data.inspect.digests import Digests, Distinct, FirstRows
from train.data.inspect.texts import TextCounts


def small(monkeypatch: pytest.MonkeyPatch, held: int, items: int = 64) -> None:
    """Few digests in memory, and a filter that is soon full, and then takes everything for known."""
    monkeypatch.setattr(module, "HELD", held)
    monkeypatch.setattr(module, "ITEMS", items)


@pytest.mark.parametrize("repeat", [1, 3])
@pytest.mark.parametrize("held", [7, 60, 1000])
def test_digests_equal_the_plain_search(repeat: int, held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, held)
    dice = np.random.default_rng(repeat)
    ours, theirs = Digests(), Digests()
    a, b = dice.integers(0, 40, 60).tolist(), dice.integers(0, 40, 30).tolist()
    for digests, values in ((ours, a), (theirs, b)):
        for i, value in enumerate(values):
            digests.add(value << 57, i // repeat)
    first = [a.index(value) // repeat for value in a]
    for _ in range(2):  # it may be asked again
        again, there = list(ours.repeats()), list(ours.shared(theirs))
        assert sorted(again) == sorted((i // repeat, first[i]) for i in range(60) if first[i] != i // repeat)
        assert sorted(there) == sorted((i // repeat, b.index(value) // repeat) for i, value in enumerate(a) if value in b)
        rows = [[row for row, _ in pairs] for pairs in (again, there)]
        assert held < 1000 or rows == [sorted(of) for of in rows]
    assert not list(ours.shared(Digests())) and not list(Digests().repeats()) and not list(Digests().shared(ours))
    assert len(ours) == 60


@pytest.mark.parametrize("items", [10, 62_000])
def test_what_is_found_does_not_depend_on_the_filter(items: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is full takes every digest for known."""
    small(monkeypatch, 512, items)
    dice = np.random.default_rng(1)
    values = dice.integers(0, 1 << 63, 6000, np.uint64)
    values[5000:] = values[:1000]
    digests = Digests()
    for i, value in enumerate(values.tolist()):
        digests.add(value, i)
    assert sorted(digests.repeats()) == [(5000 + i, i) for i in range(1000)]


def test_memory_does_not_grow_with_the_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, 1 << 10, 10_000)
    values = np.random.default_rng(2).integers(0, 1 << 63, 1 << 15, np.uint64)

    def most(count: int) -> int:
        digests = Digests()
        tracemalloc.start()
        try:
            for i in range(0, count, 1 << 10):
                for j, value in enumerate(values[i : i + (1 << 10)].tolist()):
                    digests.add(value, i + j)
            assert not list(digests.repeats())
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert most(1 << 15) < 1.5 * most(1 << 12)


def test_a_disk_without_room_is_told_with_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, 4)

    def full(data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: SimpleNamespace(seek=lambda *at: 0, write=full))
    digests = Digests()
    with pytest.raises(UserError, match=r"has no room for the digests of 4 rows \(No space left on device\): .* TMPDIR"):
        for i in range(4):
            digests.add(i, i)


def test_distinct_values_are_exact_and_then_estimated_within_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, 1000, 20_000)
    values = np.random.default_rng(3).integers(0, 1 << 63, 30_000, np.uint64).tolist()
    distinct = Distinct()
    for count, value in enumerate(values[:1000], 1):
        distinct.add(value)
        distinct.add(value)
        assert distinct.count == count and not distinct.error
    for value in [*values, *values]:
        distinct.add(value)
    assert 0 < distinct.error < 0.01
    assert 0 < abs(distinct.count - 30_000) < 4 * distinct.error * 30_000


def test_texts_say_what_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, 50, 5000)
    counts = TextCounts()
    for i in range(40):
        counts.add(f"Word{i} again")
    assert counts.plain()["distinct_texts"] == 40 and "standard_errors" not in counts.plain() and not counts.estimated
    for i in range(2000):
        counts.add(f"word{i}  AGAIN")
    plain = counts.plain()
    assert set(plain["standard_errors"]) == {"distinct_texts", "distinct_words"}
    assert abs(plain["distinct_texts"] - 2000) < 60 and abs(plain["distinct_words"] - 2001) < 60


def test_first_rows_are_those_of_each_name(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, 2)
    ours, theirs = FirstRows(), FirstRows()
    for i, name in enumerate(["", "a", "a", "b", "c", "b", "d"]):
        ours.add(name, i)
    for i, name in enumerate(["d", "", "b", "b"]):
        theirs.add(name, i)
    assert sorted(ours.digests.shared(theirs.digests)) == [(3, 2), (6, 0)]


def test_a_validation_finds_the_same_with_few_digests_in_memory(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = stored(tmp_path / "data", [row(i % 4) for i in range(8)])
    other = stored(tmp_path / "other", [row(i) for i in (3, 9, 1)])
    whole = found(data, other)
    small(monkeypatch, 3, 8)
    again = found(data, other)
    assert again.counts == whole.counts and whole.counts["duplicate_row"] == 4 and whole.counts["leaked_audio"] == 4
    assert {kind: sorted(shown) for kind, shown in again.shown.items()} == {kind: sorted(s) for kind, s in whole.shown.items()}
