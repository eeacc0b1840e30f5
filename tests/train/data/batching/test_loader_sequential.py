"""The loader where rows are read in pieces: each group once, exact over stops, the same for any number of workers."""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.train.data.batching.test_loader import check_resumes, plainly_stored, same_steps, take
from tests.train.data.toys import MODELS, TASKS, TOKENIZER, ToySource, codec_of, maker_of
from train.data.batching.loader import Pipeline, StepLoader, merge, process_shards
from train.data.build import build_pipeline
from train.data.config import DataConfig, PackingConfig, SourceConfig
from train.data.rows import files, parquet
from train.data.rows.parquet import Needed, StoredRows, leaf_paths, write_rows
from train.data.rows.row import Row, RowTurn
from train.data.sources.mixture import Draw, Mixture, TaskMixture

MODEL = MODELS["codec2"]
FILES, GROUP = (11, 14, 0, 6), 3
ROWS, GROUPS = sum(FILES), 4 + 5 + 0 + 2


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "PIECE", GROUP)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four files, one of them empty, in groups of 3 rows and fewer at their ends."""
    folder, first = tmp_path_factory.mktemp("rows"), 0
    source = ToySource("toy", None, codec_of(MODEL))
    for number, count in enumerate(FILES):
        write_rows(folder / f"rows-{number:05d}.parquet", map(source.row, range(first, first + count)), GROUP)
        first += count
    return folder


def mixture(folder: Path, window: int = 3 * GROUP, held_out: int = 0, **options: Any) -> Mixture:
    source = StoredRows(folder, held_out=held_out, window=window, **options)
    assert source.windows is not None
    return Mixture([source], [1.0], 3, windows={0: source.windows})


def pipeline(folder: Path, mixed: bool = False) -> Pipeline:
    """One source that is gone through in epochs, or two others besides."""
    mix = mixture(folder)
    if mixed:
        others = [ToySource("others", None, codec_of(MODEL)), StoredRows(folder)]
        mix = Mixture([mix.sources[0], *others], [2.0, 1.0, 1.0], 3, windows=mix.windows)
    packing = PackingConfig(rows=2, length=160, buffer=6)
    return Pipeline(mix, [TaskMixture(TASKS)] * len(mix.sources), maker_of(MODEL), packing, 3)


def rows_of(mix: Mixture, draws: Iterator[Draw]) -> list[Row]:
    source = mix.sources[0]
    assert isinstance(source, StoredRows)
    return [source.row(draw.index, draw.source_draw) for draw in draws]


def test_rows_are_those_that_are_read_one_by_one(folder: Path) -> None:
    stored, mix = StoredRows(folder), mixture(folder)
    draws = [mix.draw(number, 2) for number in range(ROWS)]
    assert [row.where for row in rows_of(mix, iter(draws))] == [stored[draw.index].where for draw in draws]
    assert sorted(draw.index for draw in draws) == list(range(ROWS))
    again = pickle.loads(pickle.dumps(mix))
    assert [again.draw(draw.number, 2) for draw in draws[::-1]] == draws[::-1]


@pytest.mark.parametrize("packers", [1, 2, 5])
def test_a_group_is_opened_once_an_epoch(folder: Path, packers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one packer each, but for those that the ends of their runs cut; and no more than a window of each is kept."""
    opened: Counter[str] = Counter()
    read = parquet.OpenFile.read

    def counted(file: parquet.OpenFile, row: int, parts: frozenset[str]) -> Any:
        first, table = read(file, row, parts)
        opened[str(table.column("turns")[0])] += 1
        return first, table

    monkeypatch.setattr(parquet.OpenFile, "read", counted)
    mix = mixture(folder, needed=Needed(frozenset({"T1T2"})))
    for epoch in (1, 2):
        for number in range((epoch - 1) * ROWS, epoch * ROWS):
            rows_of(mix, iter([mix.draw(number, packers)]))
            kept = mix.sources[0]._of_window
            assert len(kept) <= packers and all(len(groups) <= 3 for _, groups in kept.values())
        assert len(opened) == GROUPS and opened.total() <= epoch * (GROUPS + packers - 1)
    assert packers > 1 or set(opened.values()) == {2}


class CountingFile(io.FileIO):
    """A file that counts the bytes that are read of it."""

    read_bytes = 0

    def read(self, size: int = -1) -> bytes:
        data = super().read(size)
        CountingFile.read_bytes += len(data)
        return data


@pytest.mark.parametrize("tasks", [{"T1T2"}, {"A1A2"}])
def test_bytes_that_are_read_are_those_that_are_used(folder: Path, tasks: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "opened", lambda file: CountingFile(file))
    monkeypatch.setattr(CountingFile, "read_bytes", 0)
    needed = Needed(frozenset(tasks))
    mix, used = mixture(folder, needed=needed), 0
    for file in folder.glob("*.parquet"):
        metadata = pq.read_metadata(file)
        paths = leaf_paths(metadata, needed.first)
        columns = [metadata.row_group(g).column(c) for g in range(metadata.num_row_groups) for c in range(metadata.num_columns)]
        used += sum(column.total_compressed_size for column in columns if column.path_in_schema in paths)
    for number in mix.windows[0].starts[:-1]:
        mix.sources[0].row(int(number))  # so that footers have been read
    CountingFile.read_bytes = 0
    rows_of(mix, (mix.draw(number) for number in range(ROWS)))
    assert used <= CountingFile.read_bytes <= 1.2 * used
    CountingFile.read_bytes = 0
    monkeypatch.setattr(parquet, "KEPT_GROUPS", 1)
    alone = StoredRows(folder, needed=needed)
    for number in sorted(range(ROWS), key=lambda number: number % 7):
        alone.row(number)
    assert CountingFile.read_bytes > 2 * used  # each row with its whole group


def test_held_out_rows_are_not_drawn_and_all_others_are(folder: Path) -> None:
    mix = mixture(folder, held_out=5)
    source = mix.sources[0]
    assert isinstance(source, StoredRows)
    held = {source.where(number) for number in source.held_out_indices(5)}
    for epoch in (0, 1):
        rows = [row.where for row in rows_of(mix, (mix.draw(epoch * source.size + n, 3) for n in range(source.size)))]
        assert len(set(rows)) == len(rows) == ROWS - 5 and not held & set(rows)


@pytest.mark.long
@pytest.mark.parametrize("mixed", [False, True])
def test_stopped_at_any_step_it_goes_on_as_if_it_had_not(folder: Path, mixed: bool) -> None:
    check_resumes(lambda **state: StepLoader(pipeline(folder, mixed), 2, **state), 5, range(1, 5))


@pytest.mark.long
def test_a_run_of_two_workers_goes_on_alike_with_any_number_and_on_two_processes(folder: Path) -> None:
    whole = StepLoader(pipeline(folder), 2, workers=2)
    for _ in range(3):
        next(whole)
    states = plainly_stored(whole.states)
    wanted = take(whole, 3)
    same_steps(take(StepLoader(pipeline(folder), 2, workers=0, start_step=3, states=states), 3), wanted)
    halves = [StepLoader(pipeline(folder), 2, process_shards(2, rank, 2), 0, 3, states) for rank in range(2)]
    same_steps([a + b for a, b in zip(*(take(half, 3) for half in halves), strict=True)], wanted)
    assert merge([half.states for half in halves]).keys() == states.keys()


def test_the_configuration_chooses(folder: Path) -> None:
    def made(**options: Any) -> Pipeline:
        source = SourceConfig("stored", tasks={"T1T2": 1.0}, path=str(folder), **options)
        return build_pipeline(DataConfig((source,), packing=PackingConfig(length=160)), MODEL, TOKENIZER, codec_of(MODEL))

    assert not made().mixture.windows
    found = made(order="sequential", window=4 * GROUP - 1, held_out=3).mixture.windows[0]
    assert (found.width, found.rows) == (4, ROWS - 3)
    wide = made(order="sequential", window=1000)
    assert len({wide.fetch(number).where for number in range(ROWS)}) == ROWS


def test_rows_of_large_groups_come_from_their_copy(tmp_path: Path) -> None:
    rows = [Row((RowTurn(question_text="q", answer_text="a"),), id=str(i)) for i in range(100)]
    write_rows(tmp_path / "rows.parquet", rows, 100)
    mix = mixture(tmp_path, cache=tmp_path / "cache")
    assert sorted(int(row.id) for row in rows_of(mix, map(mix.draw, range(100)))) == list(range(100))
