"""`omni-train data answers`: rows get the answers that the model writes when it is asked alone, and keep all else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from omni.generate.speech_lm import SpeechLM
from omni.pretrained import find_model
from tests.train.data.prepare.test_prepare import _interrupted_at, files_of
from train.cli import main
from train.data.prepare import shards
from train.data.prepare.rows import BlockMaker
from train.data.rows.parquet import StoredRows, write_rows
from train.data.rows.row import Codes, Row, RowTurn, Sound, Word

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def stored(folder: Path) -> list[Row]:
    """Spoken and written questions; the fourth is long to answer, the fifth has no text, the sixth is a conversation."""
    sound, codes = Sound(torch.rand(1600) - 0.5, 16000), Codes("codec2", torch.ones(4, 3, dtype=torch.int32))
    old = RowTurn("", sound, "old", sound, codes, (Word("what", 0.0, 0.5, "user"), Word("old", 0.0, 0.1, "model")), 1.0, 2.0)
    asked = [f"what is {a} plus {b}?" for a in WORDS for b in WORDS[:7]]
    asked[3:5] = "repeat one two three four five six seven", " "
    rows = [Row((replace(old, question_text=text),), id=f"r{n}", speaker="s", system="") for n, text in enumerate(asked)]
    rows[5] = replace(rows[5], turns=(rows[6].turns[0], rows[9].turns[0]))
    write_rows(folder / "rows.parquet", rows)
    return list(StoredRows(folder))


def test_rows_get_the_answers_of_each_question_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, lm = stored(tmp_path / "in"), SpeechLM.from_pretrained("nano")
    command = ["data", "answers", str(find_model("nano")), str(tmp_path / "in")]
    options = ["--max_tokens", "16", "--progress", "off"]
    monkeypatch.setattr(shards, "SHARD_GROUPS", 1)
    assert main([*command, str(tmp_path / "out"), "--rows", "7", *options]) == 0
    got = {row.id: row for row in StoredRows(tmp_path / "out")}
    broken = (tmp_path / "out/broken.csv").read_text().splitlines()
    assert got.keys() == {row.id for row in rows} - {"r3", "r4"} and "text" in broken[2]
    assert broken[1].endswith("its answer has no end within 16 tokens")
    assert json.loads((tmp_path / "out/report.json").read_text())["broken"] == 2
    for row in got.values():
        before = rows[int(row.id[1:])]
        with lm.session(max_tokens=16) as session:
            for turn, old in zip(row.turns, before.turns, strict=True):
                alone = session.ask(old.question_text, "T1T2").answer()
                assert (turn.answer_text, "end") == (alone.text, alone.ended)
                kept = replace(old, answer_text=alone.text, answer_audio=None, answer_codes=None, answer_start=0.0)
                assert replace(turn, question_audio=None) == replace(kept, question_audio=None, words=old.words[:1])
                assert turn.question_audio.data == old.question_audio.data
    assert len({turn.answer_text for row in got.values() for turn in row.turns}) > 5

    monkeypatch.setattr(BlockMaker, "__call__", _interrupted_at(64, call := BlockMaker.__call__))
    assert main([*command, str(tmp_path / "again"), *options]) == 130
    monkeypatch.setattr(BlockMaker, "__call__", call)
    assert main([*command, str(tmp_path / "again"), "--max_tokens", "17", "--progress", "off"]) == 2
    assert main([*command, str(tmp_path / "again"), *options]) == 0
    assert files_of(tmp_path / "again") == files_of(tmp_path / "out")
