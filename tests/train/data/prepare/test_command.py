"""`omni-train data prepare`: options, a file of them, what is shown meanwhile and at the end."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from omni.codec.registry import load_codec
from tests.train.data.readers.toys import flac, heard, write_tone
from train.cli import main
from train.console import progress
from train.data.prepare.shards import MISSING
from train.data.rows.parquet import StoredRows
from train.data.rows.row import Sound

COLUMNS = "{question_audio: wav, question_text: transcript, answer_text: reply, answer_audio: said}"


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def table(folder: Path, count: int, missing: tuple[int, ...] = ()) -> Path:
    """Rows of columns with names of their own; the recordings of `missing` are not there."""
    lines = ["transcript,wav,reply,said"]
    for index in range(count):
        if index not in missing:
            write_tone(folder / f"wav/q{index}.wav", 0.1, 200 + index)
        lines.append(f"Frage {index}?,q{index}.wav,Antwort {index}.,a.wav")
    write_tone(folder / "wav/a.wav", 0.2, 500)
    (folder / "my.csv").write_text("\n".join(lines) + "\n")
    return folder / "my.csv"


def test_a_table_with_columns_and_a_file_of_options_becomes_rows(tmp_path, monkeypatch, capsys):
    """Options outweigh the file; the rows are what was asked for, and the report says what they are."""
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    source = table(tmp_path / "in", 40, missing=(2, 33))
    read = f"read: {{folder: {tmp_path / 'in/wav'}, language: fr, name: mine}}"
    (tmp_path / "options.yaml").write_text(f"{read}\ncodec: codec2\nlimit: 39\nworkers: 1\n")
    options = ["--config", tmp_path / "options.yaml", "--read.columns", COLUMNS, "--read.language", "de"]
    command = ["data", "prepare", source, tmp_path / "out", *options, "--limit", "36", "--workers", "0", "--progress", "lines"]
    assert run(*command) == 0
    rows = list(StoredRows(tmp_path / "out"))
    assert [row.turns[0].question_text for row in rows] == [f"Frage {i}?" for i in range(36) if i not in (2, 33)]
    assert {(row.source, row.language) for row in rows} == {("mine", "de")}
    heard(rows[2].turns[0].question_audio, 0.1, 203)
    turn = rows[2].turns[0]
    codec = load_codec("codec2")
    wanted = codec.encode(Sound(data=flac(0.2, 500)).load(codec.sample_rate))
    assert turn.answer_text == "Antwort 3." and turn.answer_codes is not None and turn.answer_audio is None
    assert turn.answer_codes.frames.tolist() == wanted.tolist()
    shown = capsys.readouterr()
    report = shown.out.splitlines()
    assert report[:2] == [f"34 rows of 36 items in {tmp_path / 'out'}", "34 answers encoded"]
    assert report[2] == "3s of spoken questions, 7s of spoken answers"
    assert report[3] == f"2 items made no row: see {tmp_path / 'out' / 'broken.csv'}"
    stored = json.loads((tmp_path / "out" / "report.json").read_text())
    assert stored["reasons"] == {MISSING: 2}  # one reason, whatever the names
    assert report[4] == f"       2  {MISSING}" and len(report) == 7
    for line, number in zip(report[5:], (2, 33), strict=True):
        assert line.strip().startswith(f"{source} line {number + 2}: 'q{number}.wav' is not there: "), line
    *lines, last = shown.err.splitlines()
    line = r"(\d+) of 36 items \(\d+\.\d%\), (starting|\d+\.\d items/s, \d+\.\dx real time, \d+s left)"
    found = [match for text in lines if (match := re.fullmatch(line, text))]
    done = [int(match[1]) for match in found]
    assert len(found) == len(lines) and done == [32, 36]
    assert found[0][2] == "starting" and found[-1][2].endswith(", 0s left")
    assert re.fullmatch(r"took \d+s", last)
    assert run(*command, "--progress", "off") == 0  # whole already
    assert capsys.readouterr() == (shown.out, "")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_recordings_that_are_left_out_are_counted(workers, tmp_path, capsys):
    lines = [{"question_text": "q", "question_audio": f"{i}.wav", "answer_text": "a"} for i in range(80)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["data", "prepare", str(tmp_path / "in.jsonl"), str(tmp_path / "out"), "--read.audio", "optional"]
    for _ in range(2):
        assert main([*command, "--workers", str(workers), "--progress", "off"]) == 0
        assert "80 recordings missing or damaged, and left out (--read.audio optional)" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "report.json").read_text())["left_out"] == 80


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--read.colums", "{}"], "unknown option --read.colums; did you mean --read.columns?"),
        (["--read.columns", "{answer_text: answer}"], "has no column 'answer': it has transcript, wav, reply, said"),
        (["--config", "TWICE"], "twice.yaml line 3: limit is given again, after line 1; keep one"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(arguments, line, tmp_path, capsys):
    data, twice = table(tmp_path / "in", 2), tmp_path / "in" / "twice.yaml"
    twice.write_text("limit: 1\nseed: 2\nlimit: 3\n")
    words = [argument.replace("TWICE", str(twice)) for argument in arguments]
    assert run("data", "prepare", data, tmp_path / "out", *words) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ") and line in shown.err and shown.err.count("\n") == 1 and not shown.out
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
