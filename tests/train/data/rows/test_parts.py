"""Parts of rows that are read for some tasks: examples are those of whole rows, and what no task needs is not read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from omni.errors import UserError
from omni.tasks import TASKS
from tests.train.data.rows.test_rows import rows
from tests.train.data.toys import MODELS, maker_of
from train.data.batching.examples import Example, Unusable
from train.data.batching.loader import Pipeline
from train.data.config import PackingConfig
from train.data.rows.parquet import PARTS, Needed, StoredRows, write_rows
from train.data.rows.row import Row, Sound, Word, to_plain
from train.data.sources.mixture import Mixture, TaskMixture

MODEL = MODELS["codec2"]
SETS = [["T1T2"], ["A1T1"], ["T1A1"], ["A1A2"], ["T1T2", "A1T2"], ["T1A2", "A1T1"], []]


def made(count: int, task: str = "", codes: bool = True) -> list[Row]:
    """Conversations with words and a recording of every answer, some of which have no codes."""
    out = []
    for number, row in enumerate(rows(count)):
        sound, words = Sound(torch.full((320 * 3,), 0.25), 8000), (Word("x", 0.0, 0.1, "model"),)
        turns = [replace(turn, answer_audio=sound, words=words) for turn in row.turns]
        if not codes or number % 3 == 0:
            turns[-1] = replace(turns[-1], answer_codes=None)
        out.append(replace(row, task=task, turns=tuple(turns)))
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of no task, of each task, of an unknown one, and without codes."""
    folder = tmp_path_factory.mktemp("rows")
    write_rows(folder / "a.parquet", made(7), row_group=3)
    tasks = [*TASKS, "T9"]
    write_rows(folder / "b.parquet", [replace(r, task=t) for r, t in zip(made(7), tasks, strict=True)], row_group=4)
    write_rows(folder / "c.parquet", made(4, codes=False), row_group=3)
    return folder


def wanted_of(needed: Needed, row: Row) -> set[str]:
    """What a row is read for: what all rows of the source are, and what its own task needs, as docs/data.md says it."""
    of_source, own = ([TASKS[name] for name in names if name in TASKS] for names in (needed.tasks, [row.task]))
    wanted = {"words"} if needed.words and not needed.heard_only else set()
    if any(task.question == "audio" for task in (*of_source, *own)):
        wanted.add("question_audio")
    if any(task.audio for task in (*of_source, *own)) and not needed.heard_only:
        wanted.add("answer_codes")
        if any(task.audio for task in (own if row.task else of_source)) and any(t.answer_codes is None for t in row.turns):
            wanted.add("answer_audio")
    return wanted


@pytest.mark.sampled(1)
@pytest.mark.parametrize("words, heard_only", [(False, False), (True, False), (True, True)])
def test_rows_have_what_their_tasks_need_and_lack_the_rest(words, heard_only, folder):
    whole = StoredRows(folder)
    assert {len(row.turns) for row in whole} > {1}
    for tasks in SETS:
        needed = Needed(frozenset(tasks), words, heard_only)
        stored = StoredRows(folder, needed=needed)
        for number in (*range(len(stored)), 9, 2, 17):
            row, wanted = stored[number], to_plain(whole[number])
            for turn in wanted["turns"]:
                turn.update({part: [] if part == "words" else None for part in turn.keys() & PARTS - wanted_of(needed, row)})
            assert to_plain(row) == wanted
        assert [to_plain(row) for row in stored.whole()] == [to_plain(row) for row in whole]


def examples(folder: Path, tasks: dict[str, float], whole: bool, heard_only: bool, cut: float) -> list[Example | Unusable]:
    needed = None if whole else Needed(frozenset(tasks), cut > 0, heard_only)
    mixture = Mixture([StoredRows(folder, needed=needed)], [1.0], 5)
    maker = maker_of(MODEL, heard_only=heard_only, cut=cut)
    packing = PackingConfig(rows=2, length=1000, buffer=6, too_long="skip")
    pipeline = Pipeline(mixture, [TaskMixture(tasks)], maker, packing, 5, broken="skip")
    return [pipeline.fetch(number) for number in range(36)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("heard_only, cut", [(False, 0.0), (False, 0.7), (True, 0.0)])
@pytest.mark.parametrize("tasks", [{"T1T2": 1.0}, {"A1A2": 1.0}, {"A1T1": 1.0, "T1A1": 1.0}])
def test_examples_are_those_of_whole_rows(tasks, heard_only, cut, folder):
    found, wanted = (examples(folder, tasks, whole, heard_only, cut) for whole in (False, True))
    assert sum(isinstance(one, Example) for one in found) > 4
    for one, other in zip(found, wanted, strict=True):
        assert type(one) is type(other)
        if isinstance(one, Unusable) or isinstance(other, Unusable):
            assert (str(one), vars(one)) == (str(other), vars(other))
            continue
        assert (one.where, one.tasks) == (other.where, other.tasks) and torch.equal(one.task, other.task)
        for a, b in zip(vars(one.columns).values(), vars(other.columns).values(), strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(one.clips, other.clips, strict=True):
            assert torch.equal(a.inputs, b.inputs) and (a.frames, a.transcript) == (b.frames, b.transcript)


def test_only_these_columns_are_read(tmp_path, monkeypatch):
    """A column that a task does not need may be damaged; what a row without codes needs is read once, and alone."""
    file = tmp_path / "a.parquet"
    write_rows(file, made(6), row_group=3)
    metadata = pq.read_metadata(file)
    content = bytearray(file.read_bytes())
    for group in range(2):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            if "answer_audio" in column.path_in_schema or "words" in column.path_in_schema:
                start = column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
                content[start + column.total_compressed_size - 1] ^= 0xFF
    file.write_bytes(content)
    read: list[list[str]] = []
    real = pq.ParquetFile.read_row_group

    def watched(self, group, columns, **more):
        read.append([path.split(".")[3] for path in columns if path.startswith("turns.")])
        return real(self, group, columns=columns, **more)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", watched)
    texts = ["question_text", "answer_text", "question_start", "answer_start"]
    for tasks, parts in ((["T1T2"], []), (["A1T1"], ["question_audio"] * 2)):
        assert [row.id for row in StoredRows(tmp_path, needed=Needed(frozenset(tasks)))] == list("012345")
        assert sorted(read[0]) == sorted(read[1]) == sorted(texts + parts) and len(read) == 2
        read.clear()
    stored = StoredRows(tmp_path, needed=Needed(frozenset({"A1A2"})))
    assert stored[1].turns[-1].answer_codes is not None and len(read) == 1
    with pytest.raises(UserError, match=r"a.parquet \(rows 0 to 2\) cannot be read"):
        stored[0]  # its last turn has no codes
    assert len(read) == 2 and set(read[1]) == {"answer_audio"}
