"""`data prepare --shard`: parts made by several machines are all rows once, in folders that a run reads as one."""

from __future__ import annotations

import itertools

import pytest

from omni.errors import UserError
from tests.train.data.prepare.test_prepare import _interrupted_at, files_of, made
from tests.train.data.prepare.toys import ToySource
from train.data.prepare import rows as blocks
from train.data.prepare.rows import PrepareConfig
from train.data.rows.parquet import StoredRows


@pytest.mark.parametrize(("total", "count"), [(0, 3), (1, 3), (5000, 7), (10**6, 3), (10**8, 999)])
def test_parts_are_all_items_once(total, count):
    ranges = [PrepareConfig(shard=f"{number}/{count}").items(total) for number in range(count)]
    assert ranges[0].start == 0 and ranges[-1].stop == total
    assert all(one.stop == other.start for one, other in itertools.pairwise(ranges))
    assert all(one.start % 32 == 0 or one.start == total for one in ranges)
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 32
    assert PrepareConfig(limit=4).items(total) == range(min(4, total))


@pytest.mark.parametrize("count", [2, 3])
def test_parts_are_the_rows_of_one_preparation(count, tmp_path):
    source = ToySource(200, "text", broken=(3, 70, 71, 130))
    made(tmp_path / "whole", source, codec="")
    places = [tmp_path / str(number) for number in range(count)]
    done = [made(place, source, codec="", shard=f"{number}/{count}") for number, place in enumerate(places)]
    assert sum(tally.rows for tally in done) == 196 and sum(tally.broken for tally in done) == 4
    ids = [row.id for place in places for row in StoredRows(place, tmp_path / "cache")]
    assert ids == [row.id for row in StoredRows(tmp_path / "whole", tmp_path / "cache")]
    joined = StoredRows([str(place) for place in places], tmp_path / "cache", held_out=4, window=2)
    whole = StoredRows(tmp_path / "whole", tmp_path / "cache", held_out=4)
    assert [joined.row(i).id for i in range(joined.size)] == [whole.row(i).id for i in range(whole.size)]
    held = [[rows[i].id for i in rows.held_out_indices(4)] for rows in (joined, whole)]
    assert held[0] == held[1] and joined.where(195).startswith(f"{places[-1]}/rows-")
    assert joined.windows is not None and joined.windows.rows == 192
    assert len(StoredRows(places[1])) == done[1].rows
    assert (places[-1] / "broken.csv").read_text().splitlines()[1:] == ["130,toy.jsonl row 130,no such recording"]
    assert made(places[1], source, codec="", shard=f"1/{count}") == done[1]  # whole already
    with pytest.raises(UserError, match=f"shard was '1/{count}' and is now '0/{count}'"):
        made(places[1], source, codec="", shard=f"0/{count}")


def test_a_part_that_was_cut_short_is_gone_on_with(tmp_path, monkeypatch):
    options = {"source": ToySource(200), "shard": "1/2"}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(blocks.BlockMaker, "__call__", _interrupted_at(192, blocks.BlockMaker.__call__))
        made(tmp_path / "out", **options)
    assert list((tmp_path / "out.preparing").glob("rows-*.parquet"))
    assert made(tmp_path / "out", **options) == made(tmp_path / "whole", **options)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


@pytest.mark.parametrize("shard", ["3/3", "0/0", "1", "-1/2", "a/b"])
def test_a_part_that_is_none_is_refused(shard):
    with pytest.raises(UserError, match="is not as 3/16: the number of a part, from 0 on"):
        PrepareConfig(shard=shard)


def test_a_part_without_items_is_told(tmp_path):
    with pytest.raises(UserError, match=r"of 0 items .* none makes a row|has 0 items and none makes a row"):
        made(tmp_path / "out", ToySource(40), shard="0/9")
    assert not list(tmp_path.iterdir())
