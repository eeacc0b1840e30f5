"""Prepared rows prepared again: for another codec, with other voices, and never with anything lost by the way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
import torch

from omni.errors import UserError
from tests.train.data.prepare.test_codecs import save_snac
from tests.train.data.prepare.toys import beep
from tests.train.data.readers.toys import RATE, noise, only_broken, own_rows, rows, write_lines
from train.data.prepare.prepare import prepare
from train.data.prepare.rows import PrepareConfig
from train.data.readers import Broken, ReaderOptions, open_source, recognise
from train.data.rows.parquet import StoredRows, write_rows
from train.data.rows.row import Row, RowTurn, Sound, Word, to_plain


def recorded(folder: Path) -> Path:
    """A table of questions and answers that are recordings."""
    folder.mkdir()
    for name in ("q0", "q1", "a0", "a1"):
        soundfile.write(folder / f"{name}.wav", noise(1.0, ord(name[0]) + int(name[1])), RATE)
    lines = [{"question_audio": f"q{i}.wav", "answer_audio": f"a{i}.wav", "answer_text": "a"} for i in range(2)]
    return write_lines(folder / "a.jsonl", lines)


@pytest.mark.long
def test_kept_answers_are_encoded_by_another_codec_as_their_recordings_are(tmp_path):
    save_snac(tmp_path / "snac")
    snac = PrepareConfig(codec="snac", codec_folder=str(tmp_path / "snac"), workers=0)
    source = recorded(tmp_path / "d")
    prepare(source, tmp_path / "first", PrepareConfig(codec="codec2", keep_answer_audio=True, workers=0))
    assert prepare(tmp_path / "first", tmp_path / "again", snac).encoded == 2
    prepare(source, tmp_path / "direct", snac)
    for old, new, wanted in zip(*(StoredRows(tmp_path / name) for name in ("first", "again", "direct")), strict=True):
        kept, made, direct = (row.turns[0].answer_codes for row in (old, new, wanted))
        assert kept is not None and made is not None and direct is not None
        assert (kept.codec, made.codec) == ("codec2", "snac") and torch.equal(made.frames, direct.frames)
        assert (new.id, new.source, new.turns[0].answer_text) == (old.id, "table", "a")
        assert new.turns[0].question_audio is not None and old.turns[0].question_audio is not None
        assert torch.equal(new.turns[0].question_audio.load(RATE), old.turns[0].question_audio.load(RATE))


def test_rows_come_back_as_they_are_stored(tmp_path):
    words = (Word("One", 0.0, 0.25, "user"), Word("Two", 0.5, 0.75, "model"))
    sound = Sound(torch.from_numpy(noise(1.0, 0)), RATE)
    first = RowTurn("One?", sound, "Two.", sound, None, words, 1.5, 2.5)
    stored = [
        Row((first, RowTurn("Three?", answer_text="Four.")), "x", "mine", "de", "ann", "A1A2"),
        Row((first,), language=""),
    ]
    write_rows(tmp_path / "a.parquet", stored)
    found, bare = rows(tmp_path)
    assert to_plain(found) == to_plain(stored[0])
    assert (bare.language, bare.source) == ("en", "rows")
    named = rows(tmp_path / "a.parquet", name="other", task="T1T2", language="fr")
    assert [(row.source, row.task, row.language) for row in named] == [("other", "T1T2", "de"), ("other", "T1T2", "fr")]


def test_recordings_that_are_left_out_are_spoken_again(tmp_path):
    config = PrepareConfig(ReaderOptions(audio="none"), speak="question", voice="tests.train.data.prepare.toys:beep", workers=0)
    assert prepare(own_rows(tmp_path / "d"), tmp_path / "out", config).spoken_questions == 3
    samples, rate = beep("One 0?")
    for row in StoredRows(tmp_path / "out"):
        (turn,) = row.turns
        assert turn.answer_audio is None and turn.answer_codes is not None and turn.question_audio is not None
        assert turn.question_audio.load(RATE).numel() == round(len(samples) * RATE / rate)


def test_recordings_that_cannot_be_had_are_optional(tmp_path):
    sound = Sound(data=b"no sound")
    turns = (RowTurn("One?", sound, "Two."), RowTurn("", sound), RowTurn("a"))
    write_rows(tmp_path / "a.parquet", [Row((turn,)) for turn in turns])
    for audio in ("optional", "none"):
        first, broken, last = open_source(tmp_path / "a.parquet", ReaderOptions(audio=audio))
        assert isinstance(first, Row) and isinstance(last, Row) and isinstance(broken, Broken)
        assert (first.turns[0].question_audio, first.turns[0].answer_text) == (None, "Two.")
        assert "turn 0 holds neither text" in broken.why
    first = next(iter(rows(tmp_path / "a.parquet")))
    assert first.turns[0].question_audio is not None and first.turns[0].question_audio.data == sound.data


def test_rows_of_another_version_are_broken(tmp_path):
    path = own_rows(tmp_path) / "a.parquet"

    table = pq.read_table(path)
    versions = pa.array(np.array([2, 1, 2], np.int32))
    pq.write_table(table.set_column(table.schema.get_field_index("version"), "version", versions), path)
    assert recognise(path).name == "rows"
    assert only_broken(path).why.startswith("is of version 1; this is version 2: prepare the data again")


def test_an_output_in_its_own_data_is_refused(tmp_path):
    with pytest.raises(UserError, match="lies in the data"):
        prepare(own_rows(tmp_path / "d"), tmp_path / "d/again", PrepareConfig(workers=0))
