"""The loader over stored rows: exact over epochs and shards (law 9), and past what is damaged."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from omni.errors import UserError
from tests.train.data.batching.test_loader import plainly_stored, same_steps, take
from tests.train.data.toys import MODELS, TASKS, maker_of, write_shards
from train.data.batching.loader import Pipeline, StepLoader
from train.data.config import PackingConfig
from train.data.rows.parquet import StoredRows
from train.data.rows.row import Row
from train.data.sources.mixture import Mixture, TaskMixture

MODEL = MODELS["codec2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("rows"))


class Unread(StoredRows):
    """Remembers which rows were asked for; those of `lost` cannot be read."""

    def __init__(self, folder: Path, lost: tuple[int, ...] = ()) -> None:
        super().__init__(folder)
        self.lost = lost
        self.asked: list[int] = []

    def row(self, index: int) -> Row:
        self.asked.append(index)
        if index in self.lost:
            raise UserError(f"row {index} is lost")
        return super().row(index)


def pipeline(source: StoredRows, broken: str = "error") -> Pipeline:
    """A source that is gone through in epochs."""
    packing = PackingConfig(rows=2, length=160, buffer=6)
    return Pipeline(Mixture([source], [1.0]), [TaskMixture(TASKS)], maker_of(MODEL), packing, 3, broken=broken)


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_stopped_in_any_epoch_stored_rows_go_on_as_if_nothing_had_stopped(folder, workers):
    steps, stops = 6, range(1, 6) if not workers else (2, 5)
    source = Unread(folder)
    take(StepLoader(pipeline(source), 2), steps)
    assert min(source.asked.count(row) for row in range(source.size)) >= 3  # so that a stop stands in the midst of an epoch
    whole, wanted, states = StepLoader(pipeline(StoredRows(folder)), 2, workers=workers), [], []
    for _ in range(steps):
        wanted.append(next(whole))
        states.append(plainly_stored(whole.states))
    whole.close()
    for stop in stops:
        resumed = StepLoader(pipeline(StoredRows(folder)), 2, workers=workers, start_step=stop, states=states[stop - 1])
        same_steps(take(resumed, steps - stop), wanted[stop:])


def damage(file: Path, group: int) -> None:
    """Turn bits in the texts of a row group."""
    column = pq.read_metadata(file).row_group(group).column(2)
    content = bytearray(file.read_bytes())
    content[column.data_page_offset + column.total_compressed_size - 3] ^= 0xFF
    file.write_bytes(content)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_rows_of_a_damaged_page_are_named_or_skipped_and_counted(folder, tmp_path, workers):
    """Batches, and states over a stop, are those of whole files of which nobody gives these rows."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    damage(tmp_path / "rows-00001.parquet", 1)
    lost = (8, 9, 10)
    with pytest.raises(UserError, match=r"rows-00001.parquet \(rows 3 to 5\) cannot be read .*prepare it again"):
        take(StepLoader(pipeline(StoredRows(tmp_path)), 1, workers=workers), 10)

    wanted = take(StepLoader(pipeline(Unread(folder, lost), "skip"), 2, workers=workers), 4)
    begun = StepLoader(pipeline(StoredRows(tmp_path), "skip"), 2, workers=workers)
    found = [next(begun) for _ in range(2)]
    states = plainly_stored(begun.states)
    begun.close()
    resumed = StepLoader(pipeline(StoredRows(tmp_path), "skip"), 2, workers=workers, start_step=2, states=states)
    found += [next(resumed) for _ in range(2)]
    resumed.close()
    for batch in (batch for step in (*found, *wanted) for batch in step):
        batch.state = {key: value for key, value in batch.state.items() if key != "counts"}  # they name the two folders
    same_steps(found, wanted)
    mixture = pipeline(StoredRows(folder)).mixture
    for state in resumed.states.values():
        first, stride = (
            state["packer_shard"] + state["packer_shards"] * state["packer_part"],
            state["packer_shards"] * state["packer_parts"],
        )
        drawn = [mixture.draw(number).index for number in range(first, state["next"], stride)]
        assert state["broken"] == sum(index in lost for index in drawn) > 0
        batches = [batch for step in found for batch in step if batch.state["packer_shard"] == state["packer_shard"]]
        taken = sum(batch.examples for batch in batches if batch.state["packer_part"] == state["packer_part"])
        assert taken + len(state["buffer"]) + state["broken"] == len(drawn)
