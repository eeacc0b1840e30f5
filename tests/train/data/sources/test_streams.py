"""The order of a stream, against lists: each row once an epoch, by any number of packers; the same from any mark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from omni.errors import UserError
from train.data.readers.records import Record
from train.data.sources.streams import PackerStream

SHARDS = (5, 9, 0, 7, 3)


def stream(packer: int, packers: int, block: int = 4, sizes: tuple[int, ...] = SHARDS, log: list | None = None) -> PackerStream:
    def opened(shard: int, start: int) -> Iterator[Record]:
        for number in range(start, sizes[shard]):
            if log is not None:
                log.append((shard, number))
            yield Record(f"{shard}.{number}", {})

    return PackerStream(len(sizes), opened, block, ("a", 1), packer, packers)


def rows(of: PackerStream, count: int, start: int = 0) -> list[str]:
    return [of.record(number).where for number in range(start, start + count)]


def first_epoch(packer: int, packers: int) -> list[str]:
    """A packer's rows before it opens a shard of its second epoch."""
    opened, found = list[int](), list[str]()
    of = stream(packer, packers)
    read = of.opened
    of.opened = lambda shard, start: (opened.append(shard), read(shard, start))[1]
    mine = max(1, len(range(packer, len(SHARDS), packers)))
    while True:
        where = of.record(len(found)).where
        if len(opened) > mine:
            return found
        found.append(where)


@pytest.mark.parametrize("packers", [1, 2, 4, 7, 13])
def test_packers_together_have_each_row_once_an_epoch(packers: int) -> None:
    found = [where for packer in range(packers) for where in first_epoch(packer, packers)]
    assert Counter(found) == Counter(f"{shard}.{row}" for shard, size in enumerate(SHARDS) for row in range(size))


def test_epochs_differ_and_blocks_are_shuffled() -> None:
    of = stream(0, 1, block=8)
    first, second = rows(of, 24), rows(of, 24, 24)
    assert first != second and sorted(first) == sorted(second)
    in_order = rows(stream(0, 1, block=1), 24)
    assert sorted(first) == sorted(in_order) != first
    for shard in {where[0] for where in first}:
        assert [where for where in in_order if where[0] == shard] == sorted(w for w in first if w[0] == shard)


@pytest.mark.parametrize(("packer", "packers"), [(0, 1), (1, 2), (6, 7)])
def test_from_any_mark_the_same_rows_follow_and_no_other_shard_is_read(packer: int, packers: int) -> None:
    wanted = rows(stream(packer, packers), 60)
    for at in range(60):
        before = stream(packer, packers)
        rows(before, at + 1)
        marks = [list(mark) for mark in before.marks_from(at)]
        log: list[tuple[int, int]] = []
        after = stream(packer, packers, log=log)
        after.restore(marks)
        assert after.record(at).where == wanted[at]
        assert len(log) <= 4 * max(1, packers // len(SHARDS) + 1) + 1  # a block of 4
        assert rows(after, 60 - at, at) == wanted[at:]


def test_rows_that_wait_are_found_by_the_marks_that_are_kept() -> None:
    wanted, of = rows(stream(0, 2), 40), stream(0, 2)
    rows(of, 30)
    marks = of.marks_from(18)
    assert marks[0].number <= 18 and len(marks) < 8 and of.marks == marks
    after = stream(0, 2)
    after.restore(marks)
    assert [after.record(n).where for n in (18, 22, 29, 30, 31, 39)] == [wanted[n] for n in (18, 22, 29, 30, 31, 39)]
    assert after.record(2).where == wanted[2]  # of before the marks: from the beginning


def test_ascending_rows_are_read_once() -> None:
    log: list[tuple[int, int]] = []
    rows(stream(0, 1, log=log), 24)
    assert Counter(log) == Counter((shard, row) for shard, size in enumerate(SHARDS) for row in range(size))


def test_a_reading_that_fails_is_made_again_from_the_block_it_failed_in() -> None:
    fails = [True]

    def opened(shard: int, start: int) -> Iterator[Record]:
        for number in range(start, 10):
            if number == 5 and fails:
                fails.clear()
                raise UserError("away")
            yield Record(f"{shard}.{number}", {})

    of = PackerStream(1, opened, 4, ("a", 1), 0, 1)
    rows(of, 4)
    with pytest.raises(UserError, match="away"):
        of.record(4)
    assert sorted(rows(of, 6, 4)) == [f"0.{n}" for n in range(4, 10)]
