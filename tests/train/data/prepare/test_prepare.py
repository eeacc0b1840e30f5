"""`data prepare`: what is stored depends on the source and the settings alone, and is whole or not there."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from omni.codec.registry import load_codec
from omni.errors import UserError
from tests.processes import Program
from tests.train.data.prepare.toys import Deadly, ToySource, Unfit
from train.data.config import SoundAugmentConfig
from train.data.prepare import rows as blocks
from train.data.prepare import shards
from train.data.prepare.prepare import discard, prepare
from train.data.prepare.rows import PrepareConfig, PrepareTally
from train.data.readers import ReaderOptions
from train.data.rows.parquet import StoredRows
from train.data.rows.row import Codes, Word

pytestmark = pytest.mark.usefixtures("forked")
HERE = Path(__file__)


def made(out: Path, source: ToySource | None = None, **options) -> PrepareTally:
    options = {"workers": 0, "codec": "codec2", "shard_mb": 1, **options}
    return prepare(HERE, out, PrepareConfig(**options), opener=lambda _: source or ToySource())


def files_of(folder: Path) -> dict[str, bytes]:
    """All files but the index, which holds the times of the others."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.long
@pytest.mark.parametrize(("kind", "workers"), [("sound", (0, 2)), ("codes", (0, 1)), ("sound", (1, 3))])
def test_the_number_of_processes_changes_no_byte(kind, workers, tmp_path):
    source = ToySource(110, kind, broken=(3, 70), bad_sound=(71,))
    few, many = (made(tmp_path / str(n), source, workers=n) for n in workers)
    assert few == many and few.rows == 107 and few.broken == 3
    assert files_of(tmp_path / str(workers[0])) == files_of(tmp_path / str(workers[1]))
    assert len(list((tmp_path / str(workers[0])).glob("*.parquet"))) > (kind == "sound")
    assert not list(tmp_path.glob("*.preparing")) and len(StoredRows(tmp_path / str(workers[0]))) == few.rows


@pytest.mark.long
def test_killed_and_gone_on_with_equals_undisturbed(tmp_path):
    """Killed with a process at work, gone on with without."""
    out, work = tmp_path / "out", tmp_path / "out.preparing"
    program = Program("tests.train.data.prepare.toys", str(HERE), str(out), "1")
    try:
        while not list(work.glob("notes/00000.json")):
            assert program.process.is_alive(), program.end().said
            time.sleep(0.01)
        with pytest.raises(UserError, match=rf"process {program.process.pid}\b"):
            made(out, ToySource(200))
    finally:
        program.process.kill()
        program.end()
    assert not out.exists() and (work / ".lock").is_file()
    with pytest.raises(UserError, match=r"\bcodec was 'codec2' and is now ''"):
        made(out, ToySource(200), codec="")
    assert made(out, ToySource(200)) == made(tmp_path / "whole", ToySource(200))
    assert files_of(out) == files_of(tmp_path / "whole")
    assert not work.exists()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("at", "kind"), [(0, "sound"), (32, "sound"), (96, "sound"), (64, "codes")])
def test_interrupted_and_gone_on_with_equals_undisturbed(at, kind, tmp_path, monkeypatch):
    source = ToySource(120, kind, broken=(5, 110))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(blocks.BlockMaker, "__call__", _interrupted_at(at, blocks.BlockMaker.__call__))
        made(tmp_path / "out", source)
    assert not list(tmp_path.glob("out.preparing/.*.part*"))
    assert made(tmp_path / "out", source) == made(tmp_path / "whole", source)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_rows_are_read_back_as_they_were_meant(tmp_path):
    source, codec = ToySource(40), load_codec("codec2")
    done = made(tmp_path / "out", source)
    rows = StoredRows(tmp_path / "out", tmp_path / "cache")
    assert len(rows) == 40 == done.encoded
    for index in (0, 1, 39):
        row, original = rows[index], source.row(index)
        assert row.id == (original.id or f"toy-{index:08d}")
        turn, wanted = row.turns[0], original.turns[0]
        assert (turn.question_text, turn.answer_text, turn.answer_audio) == (wanted.question_text, wanted.answer_text, None)
        assert wanted.question_audio is not None and wanted.answer_audio is not None
        assert turn.question_audio is not None and turn.question_audio.data is not None
        assert turn.question_audio.data[:4] == b"fLaC"
        torch.testing.assert_close(turn.question_audio.load(16000), wanted.question_audio.load(16000), atol=2**-15, rtol=0)
        assert turn.answer_codes is not None
        assert torch.equal(turn.answer_codes.frames, codec.encode(wanted.answer_audio.load(8000)))
    seconds = sum(len(source.row(i).turns[0].question_audio.load(16000)) for i in range(40)) / 16000
    assert done.question_seconds == pytest.approx(seconds, abs=0.01)


def test_changes_of_a_sound_depend_on_the_row_and_the_seed_alone(tmp_path):
    source, words = ToySource(6), tuple(Word("what", 0.1, 0.2, who) for who in ("user", "model"))
    source.row = lambda index: replace(row := ToySource.row(source, index), turns=(replace(row.turns[0], words=words),))
    augment = SoundAugmentConfig(speed=(0.8, 0.8), noise_snr_db=(5, 10), echo_probability=0.5, band_probability=0.5)
    settings = {"one": {"limit": 1}, "all": {}, "seed": {"seed": 1}, "plain": {"augment": None}}
    for out, options in settings.items():
        made(tmp_path / out, source, **{"augment": augment, **options})
    turns = [StoredRows(tmp_path / out)[0].turns[0] for out in settings]
    one, every, seed, plain = (turn.question_audio.load(16000) for turn in turns)
    assert torch.equal(one, every) and not torch.equal(one, seed) and len(one) == pytest.approx(len(plain) / 0.8, abs=1)
    assert [word.start for word in turns[0].words] == pytest.approx([0.125, 0.1], rel=1e-3)
    with pytest.raises(UserError, match="is not a folder"):
        made(tmp_path / "none", source, augment=SoundAugmentConfig(noise_snr_db=(5, 5), noise_folder="none"))


@pytest.mark.parametrize("keep", [True, False])
def test_the_sound_of_answers_is_kept_where_wanted(keep, tmp_path):
    made(tmp_path / "out", ToySource(3), keep_answer_audio=keep, answer_rate=16000)
    turn = StoredRows(tmp_path / "out", tmp_path / "cache")[2].turns[0]
    assert isinstance(turn.answer_codes, Codes)
    assert (turn.answer_audio is not None) == keep
    if turn.answer_audio is not None:
        assert len(turn.answer_audio.load(16000)) == 2 * (600 + 22)


def test_shards_have_the_size_asked_for(tmp_path):
    """No shard is larger than that by more than a block, and joined they are all rows in order."""
    made(tmp_path / "out", ToySource(140))
    shards = sorted((tmp_path / "out").glob("*.parquet"))
    assert len(shards) > 1
    assert all(shard.stat().st_size < 1.1 * (1 << 20) for shard in shards)
    texts = [turn["question_text"] for file in shards for row in pq.read_table(file)["turns"].to_pylist() for turn in row]
    assert texts == [f"what is {i}" for i in range(140)]


def test_groups_are_whole_beside_broken_items(tmp_path, monkeypatch):
    """All but the last of a file, in files of several numbers of groups."""
    monkeypatch.setattr(shards, "SHARD_GROUPS", 5)
    made(tmp_path / "out", ToySource(300, "codes", broken=(3, 40, 41, *range(100, 130), 250)), shard_mb=100)
    found = [pq.read_metadata(file) for file in sorted((tmp_path / "out").glob("*.parquet"))]
    groups = [[part.row_group(n).num_rows for n in range(part.num_row_groups)] for part in found]
    assert len(groups) > 2 and sum(map(sum, groups)) == 300 - 34 and {len(part) for part in groups[:-1]} <= {4, 5}
    assert all(part[:-1] == [16] * (len(part) - 1) and part[-1] <= 16 for part in groups)
    assert [row.turns[0].question_text for row in StoredRows(tmp_path / "out")][:4] == [f"what is {i}" for i in (0, 1, 2, 4)]


@pytest.mark.parametrize("kind", ["sound", "codes"])
def test_broken_items_are_listed_and_the_rest_kept(kind, tmp_path):
    done = made(tmp_path / "out", ToySource(20, kind, broken=(4,), bad_sound=(9,)))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (done.items, done.rows, done.broken) == (20, 18, 2) == (report["items"], report["rows"], report["broken"])
    table = (tmp_path / "out" / "broken.csv").read_text().splitlines()
    assert table[0] == "item,where,why" and table[1] == "4,toy.jsonl row 4,no such recording"
    why = "holds NaN or infinity" if kind == "sound" else "code 16 in stream 2, frame 3 is not in codec2's 0 to 15"
    assert table[2].startswith("9,toy.jsonl row 9,") and why in table[2]
    ids = [row.id for row in StoredRows(tmp_path / "out", tmp_path / "cache")]
    assert ids == [f"t{i}" if i % 2 == 0 else f"toy-{i:08d}" for i in range(20) if i not in (4, 9)]


@pytest.mark.parametrize("text", ["it is", " "])
def test_codes_of_another_codec_name_the_way_out(text, tmp_path):
    class Other(ToySource):
        def row(self, index):
            row = super().row(index)
            turn = replace(row.turns[0], answer_text=text, answer_codes=Codes("snac", torch.zeros(7, 3, dtype=torch.int32)))
            return replace(row, turns=(turn,))

    why = "its answer_codes are of the codec 'snac', not 'codec2', and it has no answer_audio to encode: "
    why += "speak its answer_text with --speak answer, or take" if text.strip() else "it has no answer_text to speak, or take"
    with pytest.raises(UserError, match=why):
        made(tmp_path / "out", Other(3, "codes"))
    if text.strip():
        assert made(tmp_path / "out", Other(3, "codes"), speak="answer").spoken_answers == 3
    assert made(tmp_path / "as they are", Other(3, "codes"), codec="").codes_taken == 3


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_row_that_no_column_can_hold_is_one_broken_item(workers, tmp_path):
    """Half a character, a code beyond 32 bits: the rows beside them are stored as ever."""
    done = made(tmp_path / "out", Unfit(40), codec="", workers=workers)
    assert (done.items, done.rows, done.broken, done.turns) == (40, 37, 3, 37)
    _, *table = (tmp_path / "out" / "broken.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in table] == ["3", "5", "39"]
    assert "holds a value that cannot be stored (UnicodeEncodeError" in table[0] and "toy.jsonl row 3," in table[0]
    assert "half" in table[1] and r"\ud83d" in table[1]
    assert "cannot be stored (ArrowInvalid" in table[2]
    rows = pq.read_table(tmp_path / "out" / "rows-00000.parquet")["turns"].to_pylist()
    assert [turn["question_text"] for row in rows for turn in row] == [f"what is {i}" for i in range(40) if i not in (3, 5, 39)]


def told(folder: Path, *questions: str) -> Path:
    """A data set of these questions in a folder."""
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"question_text": question, "answer_text": "b"}) + "\n" for question in questions]
    (folder / "a.jsonl").write_text("".join(lines))
    return folder


def test_a_folder_that_has_changed_is_noticed(tmp_path):
    source, config = told(tmp_path / "in", "old", "two"), PrepareConfig(workers=0)
    first = prepare(source, tmp_path / "out", config)
    (source / ".hidden").write_text("what no reader reads")
    assert prepare(source, tmp_path / "out", config) == first
    told(source, "new and longer", "two")
    with pytest.raises(UserError, match=r"source_files was '1 files, \d+ bytes"):
        prepare(source, tmp_path / "out", config)
    told(source, "old", "two")
    assert prepare(source, tmp_path / "out", config) == first
    (source / "a.jsonl").rename(source / "b.jsonl")
    with pytest.raises(UserError, match="source_files was"):
        prepare(source, tmp_path / "out", config)


@pytest.mark.parametrize("out", ["in", "in/out", "in/deep/out", "link/out"])
def test_an_output_within_the_data_is_refused(out, tmp_path):
    source = told(tmp_path / "in", "a")
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(UserError, match=r"output.*lies in.*/in\b"):
        prepare(source, tmp_path / out, PrepareConfig(workers=0))
    assert [path.name for path in source.iterdir()] == ["a.jsonl"]


def test_an_output_by_a_link_is_made_where_it_leads(tmp_path):
    (tmp_path / "big").mkdir()
    (tmp_path / "link").symlink_to("big")
    (tmp_path / "loose").symlink_to("later")
    for name, real in (("link", "big"), ("loose", "later")):
        for _ in range(2):
            assert made(tmp_path / name, ToySource(3)).rows == 3
        assert (tmp_path / name).is_symlink() and (tmp_path / real / "report.json").is_file()
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(UserError, match=r"round\b.*no name"):
        made(tmp_path / "round", ToySource(3))


def test_folders_that_cannot_be_replaced_are_refused_at_once(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError, match=r"output \..*folder that this runs in"):
        made(Path("."), ToySource(3))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "here")
    with pytest.raises(UserError, match=r"here\b.*mount point"):
        made(Path("here"), ToySource(3))
    assert [path.name for path in tmp_path.iterdir()] == ["here"] and not list((tmp_path / "here").iterdir())
    assert made(Path("other"), ToySource(3)).rows == 3


def test_what_is_whole_is_left_alone(tmp_path):
    first = made(tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert made(tmp_path / "out", workers=1) == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    with pytest.raises(UserError, match="source_items was 100 and is now 101"):
        made(tmp_path / "out", ToySource(101))


def test_folders_of_others_are_refused(tmp_path):
    (tmp_path / "out").mkdir()
    made(tmp_path / "out", ToySource(3))  # empty: taken
    (tmp_path / "new.preparing" / "notes").mkdir(parents=True)
    made(tmp_path / "new", ToySource(3))  # an interruption while an empty one was removed: taken
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="exists"):
        made(tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shard", [0, 1])
def test_a_full_disk(shard, tmp_path, monkeypatch):
    """One clear line; finished shards stay, nothing half-written does, and there is a way on."""
    write, count = pq.ParquetWriter.write_table, []

    def full(self, *args, **options):
        count.append(self)
        if len(set(count)) > shard:
            raise OSError(28, "No space left on device")
        return write(self, *args, **options)

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    with pytest.raises(UserError, match=rf"no space left.*rows-0000{shard}\.parquet"):
        made(tmp_path / "out", ToySource(110))
    left = sorted(path.name for path in (tmp_path / "out.preparing").glob("*"))
    assert left == (["notes", "rows-00000.parquet", "settings.json"] if shard else [])
    monkeypatch.undo()
    made(tmp_path / "out", ToySource(110))
    made(tmp_path / "other", ToySource(110))
    assert files_of(tmp_path / "out") == files_of(tmp_path / "other")


def test_a_shard_that_was_changed_is_not_gone_on_with(tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(blocks.BlockMaker, "__call__", _interrupted_at(96, blocks.BlockMaker.__call__))
        made(tmp_path / "out", ToySource(120))
    shard = tmp_path / "out.preparing" / "rows-00000.parquet"
    os.truncate(shard, 100)
    with pytest.raises(UserError, match=r"rows-00000\.parquet has 100 bytes"):
        made(tmp_path / "out", ToySource(120))


def _interrupted_at(item: int, make):
    def until(self, items):
        if items.start >= item:
            raise KeyboardInterrupt
        return make(self, items)

    return until


@pytest.mark.long
def test_a_process_that_dies_is_reported(tmp_path):
    with pytest.raises(UserError, match="a worker process was killed, perhaps for want of memory"):
        made(tmp_path / "out", Deadly(64), workers=1)
    assert not (tmp_path / "out").exists()


def test_a_start_that_failed_before_it_stored_leaves_nothing(tmp_path):
    source = tmp_path / "a.csv"
    source.write_text("question_audio,question_text,answer_text\ngone.wav,what?,that\n")
    with pytest.raises(UserError, match="none of the first 1 item makes a row"):
        prepare(source, tmp_path / "out", PrepareConfig(workers=0))
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]
    assert prepare(source, tmp_path / "out", PrepareConfig(ReaderOptions(audio="none"), workers=0)).rows == 1
    source.write_text("question_text,answer_text\n")
    with pytest.raises(UserError, match=r"\b0 items"):
        prepare(source, tmp_path / "odd", PrepareConfig(workers=0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "out"]


def test_a_start_that_stored_nothing_may_be_gone_on_with_otherwise(tmp_path, monkeypatch):
    """As a killed one leaves it, which had no time to clear up."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("train.data.prepare.prepare.discard", lambda folder: None)
        patch.setattr(blocks.BlockMaker, "__call__", _interrupted_at(0, blocks.BlockMaker.__call__))
        made(tmp_path / "out", ToySource(40))
    assert (tmp_path / "out.preparing" / "settings.json").is_file()
    assert made(tmp_path / "out", ToySource(40), codec="") == made(tmp_path / "whole", ToySource(40), codec="")


def test_what_others_put_there_stays(tmp_path):
    (tmp_path / "out.preparing").mkdir()
    (tmp_path / "out.preparing" / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match=r"none of the first 5 items.*toy\.jsonl row 0\b.*no such recording"):
        made(tmp_path / "out", ToySource(5, broken=tuple(range(5))))
    assert [path.name for path in (tmp_path / "out.preparing").iterdir()] == ["thesis.txt"]
    discard(tmp_path / "nowhere")
