"""Stored rows: what goes in comes out, by index, and whatever is broken is named with its file and number."""

from __future__ import annotations

import errno
import pickle
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
import torch

from omni.codec.registry import code_orders
from omni.errors import UserError
from tests.train.data.toys import ToyCodec, ToySource
from train.data.rows.files import sample_rows
from train.data.rows.parquet import StoredRows, write_rows
from train.data.rows.row import Codes, Row, RowTurn, Sound, Word, inside

CODEC = ToyCodec((12, 12, 6, 8))


def rows(count: int, turns: int = 3) -> list[Row]:
    source = ToySource("toy", None, CODEC, turns)
    return [replace(source.row(i), id=str(i), speaker="f1", language="de", task="A1A2" if i % 2 else "") for i in range(count)]


def same(found: Row, wanted: Row) -> None:
    assert replace(found, turns=(), where="") == replace(wanted, turns=(), where="")
    for a, b in zip(found.turns, wanted.turns, strict=True):
        assert (a.question_text, a.answer_text) == (b.question_text, b.answer_text)
        assert torch.equal(a.answer_codes.for_codec(CODEC), b.answer_codes.frames)
        quantised = (b.question_audio.samples * 32768).round() / 32768
        torch.testing.assert_close(a.question_audio.load(16000), quantised, rtol=0, atol=1.01 / 32768)


@pytest.mark.parametrize("row_group", [1, 4, 256])
def test_rows_come_back_by_index(tmp_path, row_group):
    wanted = rows(9)
    assert write_rows(tmp_path / "data.parquet", wanted, row_group) == 9
    stored = StoredRows(tmp_path / "data.parquet", tmp_path / "cache")
    assert len(stored) == 9
    for i in (5, 0, 8, 5):
        same(stored[i], wanted[i])
        assert stored[i].where == f"{tmp_path / 'data.parquet'} row {i}"
    assert pq.ParquetFile(tmp_path / "data.parquet").num_row_groups == -(-9 // row_group)


def test_audio_by_reference_is_read_from_the_files_folder(tmp_path):
    samples = torch.randn(1600) * 0.1
    (tmp_path / "sounds").mkdir()
    soundfile.write(tmp_path / "sounds" / "q.wav", samples.numpy(), 16000, subtype="FLOAT")
    row = Row((RowTurn("q?", Sound(path="sounds/q.wav"), "a"),))
    write_rows(tmp_path / "data.parquet", [row])
    read = StoredRows(tmp_path / "data.parquet", tmp_path / "cache")[0].turns[0]
    assert torch.equal(read.question_audio.load(16000), samples)
    assert read.question_audio.load(8000).shape == (800,)
    assert read.answer_audio is None and read.answer_codes is None


@pytest.mark.parametrize("path", ["../q.wav", "/etc/passwd", "a/../../q.wav"])
def test_a_reference_may_not_leave_the_folder(tmp_path, path):
    row = Row((RowTurn("q?", Sound(path=path), "a"),))
    with pytest.raises(UserError, match=r"row 1: audio .* leaves the data's folder"):
        write_rows(tmp_path / "in" / "data.parquet", [rows(1)[0], row])
    assert list((tmp_path / "in").iterdir()) == []
    with pytest.raises(UserError, match=r"leaves the data's folder"):
        Sound(path=path, folder=tmp_path / "in").load(16000)


@pytest.mark.parametrize(
    ("path", "link"), [("q.wav", "q.wav"), ("more/deep/q.wav", "more/deep"), ("more/deep/../q.wav", "more/deep")]
)
def test_a_link_may_not_lead_out_of_the_folder(tmp_path, path, link):
    (tmp_path / "in" / "more").mkdir(parents=True)
    (tmp_path / "disk").mkdir()
    for name in ("disk/q.wav", "q.wav"):
        soundfile.write(tmp_path / name, [0.0] * 10, 16000)
    (tmp_path / "in" / "q.wav").symlink_to("../disk/q.wav")
    (tmp_path / "in" / "more" / "deep").symlink_to(tmp_path / "disk")
    where = tmp_path / "disk" / ("q.wav" if link == "q.wav" else "")
    with pytest.raises(UserError, match=rf"/in\b.*'{link}'.*link to {where}"):
        Sound(path=path, folder=tmp_path / "in").load(16000)


def test_a_link_may_lead_about_in_the_folder(tmp_path):
    soundfile.write(tmp_path / "q.wav", [0.0] * 10, 16000)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "link.wav").symlink_to("../q.wav")
    assert len(Sound(path="a/link.wav", folder=tmp_path).load(16000)) == 10


@pytest.mark.parametrize("folder", ["", "clips"])
def test_a_snapshot_of_a_hub_cache_is_read_though_it_is_links(tmp_path, folder):
    """And its links may lead nowhere but to the blobs of their own repository."""
    mine, other = tmp_path / "hub" / "datasets--me--set", tmp_path / "hub" / "datasets--me--other"
    snapshot = mine / "snapshots" / "0123abcd"
    (snapshot / "clips").mkdir(parents=True)
    for place in (mine / "blobs", other / "blobs", mine / "refs"):
        place.mkdir(parents=True)
        soundfile.write(place / "c0ffee", [0.0] * 10, 16000, format="FLAC")
    for name, target in (
        ("own", "../../../blobs/c0ffee"),
        ("refs", "../../../refs/c0ffee"),
        ("other", "../../../../datasets--me--other/blobs/c0ffee"),
    ):
        (snapshot / "clips" / f"{name}.flac").symlink_to(target)
    (tmp_path / "link").symlink_to(snapshot)
    for root in (snapshot, tmp_path / "link"):
        place = "" if folder else "clips/"
        assert len(Sound(path=f"{place}own.flac", folder=root / folder).load(16000)) == 10
        assert inside(root / folder, f"{place}own.flac") == snapshot / "clips" / "own.flac"
        for name in ("refs", "other"):
            with pytest.raises(UserError, match=f"{name}.flac'.*link to .*c0ffee"):
                Sound(path=f"{place}{name}.flac", folder=root / folder).load(16000)
        with pytest.raises(UserError, match="name a file inside it"):
            Sound(path="../" * (2 + bool(folder)) + "blobs/c0ffee", folder=root / folder).load(16000)


def test_codes_of_another_order_are_put_right_and_unknown_ones_refused():
    """SNAC's frames are stored as [c0 c1 c2 c2 c1 c2 c2] by some and as [c0 | c1 c1 | c2 c2 c2 c2] by others."""
    codec = ToyCodec((16,) * 7)
    codec.name = "snac"
    streams = torch.arange(14).view(7, 2)  # as the model's streams stand
    level = torch.tensor([0, 1, 2, 2, 1, 2, 2])
    by_level = streams[torch.argsort(level, stable=True)]
    assert torch.equal(Codes("snac", by_level, "levels").for_codec(codec), streams)
    assert not torch.equal(Codes("snac", by_level).for_codec(codec), streams)
    assert sorted(code_orders("snac")["levels"]) == list(range(7))
    with pytest.raises(UserError, match=r"order 'sideways' of its answer_codes is unknown for snac; known: streams, levels"):
        Codes("snac", streams, "sideways").for_codec(codec)
    with pytest.raises(
        UserError, match=r"are of the codec 'codec2', the model's is 'snac': prepare .* with --codec snac, and --speak"
    ):
        Codes("codec2", streams).for_codec(codec)
    with pytest.raises(UserError, match=r"snac"):
        Codes("snac", streams[:4]).for_codec(codec)
    with pytest.raises(UserError, match=r"code 99 in stream 3, frame 1"):
        Codes("snac", streams.index_put((torch.tensor(3), torch.tensor(1)), torch.tensor(99))).for_codec(codec)


def test_broken_files_are_refused_with_their_names(tmp_path):
    with pytest.raises(UserError, match=r"gone.parquet does not exist"):
        StoredRows(tmp_path / "gone.parquet")
    with pytest.raises(UserError, match=r"holds no .parquet file"):
        StoredRows(tmp_path)
    write_rows(tmp_path / "data.parquet", rows(3))
    whole = (tmp_path / "data.parquet").read_bytes()
    (tmp_path / "data.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"data.parquet is not a whole Parquet file") as error:
        StoredRows(tmp_path / "data.parquet")
    assert "\n" not in str(error.value)
    (tmp_path / "data.parquet").write_text("hello")
    with pytest.raises(UserError, match=r"not a whole Parquet file"):
        StoredRows(tmp_path)


def test_rows_of_another_version_or_without_turns_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"data.parquet row 2: .* is of version 7"):
        write_rows(tmp_path / "data.parquet", [*rows(2), replace(rows(1)[0], version=7)])
    with pytest.raises(UserError, match=r"row 0: .* has no turns"):
        write_rows(tmp_path / "data.parquet", [Row(())])
    write_rows(tmp_path / "data.parquet", rows(2))
    table = pq.read_table(tmp_path / "data.parquet")
    later = table.set_column(0, "version", pa.array([2, 3], pa.int32()))
    pq.write_table(later, tmp_path / "later.parquet")
    stored = StoredRows(tmp_path / "later.parquet", tmp_path / "cache")
    assert stored[0].version == 2
    with pytest.raises(UserError, match=r"later.parquet row 1 is of version 3"):
        stored[1]


def test_a_full_disk_leaves_nothing_behind_and_what_was_there(tmp_path, monkeypatch):
    write_rows(tmp_path / "data.parquet", rows(2))
    before = (tmp_path / "data.parquet").read_bytes()

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    with pytest.raises(UserError, match=r"no space left to write .*data.parquet"):
        write_rows(tmp_path / "data.parquet", rows(3))
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["data.parquet"]
    assert (tmp_path / "data.parquet").read_bytes() == before


def test_words_and_their_times_are_kept(tmp_path):
    words = (Word("hello", 0.25, 0.5, "user"), Word("hi", 0.0, 0.125, "model"))
    turn = RowTurn("hello", answer_text="hi", words=words, question_start=3.5, answer_start=4.25)
    write_rows(tmp_path / "data.parquet", [Row((turn, RowTurn("and?", answer_text="so")))])
    (row,) = StoredRows(tmp_path / "data.parquet", tmp_path / "cache")
    assert row.turns == (turn, RowTurn("and?", answer_text="so"))


def test_a_group_without_rows_is_looked_at(tmp_path):
    """As an empty table is written."""
    write_rows(tmp_path / "a.parquet", rows(3))
    pq.write_table(pq.read_table(tmp_path / "a.parquet").slice(0, 0), tmp_path / "b.parquet")
    assert [row.id for row in sample_rows(str(tmp_path))] == [row.id for row in StoredRows(tmp_path)] == ["0", "1", "2"]


def test_large_groups_are_copied_and_small_ones_read_where_they_are(tmp_path):
    wanted = rows(70, turns=1)
    write_rows(tmp_path / "small" / "data.parquet", wanted)
    write_rows(tmp_path / "large" / "data.parquet", wanted, row_group=70)
    small, large = (StoredRows(tmp_path / name, tmp_path / f"{name}-cache") for name in ("small", "large"))
    assert not (tmp_path / "small-cache").exists() and (tmp_path / "large-cache").exists()
    for i in (69, 3, 17, 16, 3):
        same(small[i], wanted[i])
        same(large[i], wanted[i])
    again = pickle.loads(pickle.dumps(small))
    same(again[40], wanted[40])
