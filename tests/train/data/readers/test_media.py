"""Where recordings can be named, and as what: each is the question, or its row is broken and counted; pictures are refused."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.train.data.readers.toys import flac, heard, only_broken, rows, write_lines, write_parquet, write_tone
from train.data.prepare.prepare import prepare
from train.data.prepare.rows import PrepareConfig
from train.data.prepare.shards import summary
from train.data.readers import Broken, ReaderOptions, open_source
from train.data.readers.files import TAG, tags

ASKED, TOLD = {"from": "human", "value": "<audio>what?"}, {"from": "gpt", "value": "eleven"}
USER, MODEL = {"role": "user", "content": "<audio>what?"}, {"role": "assistant", "content": "eleven"}


def part(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields, {"type": "text", "text": "what?"}]}, MODEL]}


CONVERSATIONS = [
    *({"conversations": [ASKED, TOLD], name: "q.wav"} for name in ("audio", "sound", "speech", "wav", "audio_path")),
    *({"conversations": [USER, MODEL], name: ["q.wav"]} for name in ("audios", "sounds", "speeches", "wavs", "recordings")),
    {"messages": [USER, MODEL], "audios": [{"path": "q.wav", "bytes": None}]},
    {"messages": [USER | {"audio": "q.wav"}, MODEL]},
    {"messages": [USER | {"content": ""}, MODEL], "audio": "q.wav"},
    {"messages": [USER | {"content": [{"type": "audio"}, "what?"]}, MODEL], "audios": ["q.wav"]},
    {"conversations": [ASKED | {"value": "<audio>q.wav</audio>\nwhat?"}, TOLD]},
    {"conversations": [{"from": "human", "type": "audio", "value": "q.wav", "duration": 0.2}, TOLD]},
    {"conversations": [ASKED | {"value": "What?"}, {"from": "User", "type": "audio", "value": "q.wav"}, TOLD]},
    part(type="audio", audio="q.wav"),
    part(type="audio", path="q.wav"),
    part(type="audio_url", audio_url={"url": "q.wav"}),
    part(type="input_audio", input_audio={"data": base64.b64encode(flac(0.2, 300)).decode(), "format": "flac"}),
    part(audio="q.wav"),
    part(type="sound", value=["q.wav"]),
    {"instruction": "<audio>\nWhat?", "input": "", "output": "eleven", "audios": ["q.wav"]},
    {"question_audio": "q.wav", "question_text": "<|AUDIO|>", "answer_text": "eleven"},
]


@pytest.mark.parametrize("row", CONVERSATIONS, ids=str)
def test_a_recording_is_the_question(tmp_path, row):
    write_tone(tmp_path / "q.wav", 0.2, 300)
    (found,) = rows(write_lines(tmp_path / "a.jsonl", [row]))
    (turn,) = found.turns
    heard(turn.question_audio, 0.2, 300)
    assert (turn.question_text, turn.answer_text) == ("", "eleven")


def test_recordings_go_where_their_tags_are(tmp_path):
    for number in range(3):
        write_tone(tmp_path / f"{number}.wav", 0.2, 300 + 100 * number)
    said = [ASKED, TOLD, ASKED | {"value": "And in text?"}, TOLD | {"value": "<audio>yes"}, ASKED | {"value": "<audio>"}]
    names = ["0.wav", "1.wav", "2.wav"]
    (row,) = rows(write_lines(tmp_path / "a.jsonl", [{"conversations": said, "audios": names}]))
    first, second, third = row.turns
    heard(first.question_audio, 0.2, 300)
    heard(second.answer_audio, 0.2, 400)
    heard(third.question_audio, 0.2, 500)
    assert (second.question_text, second.answer_text, second.question_audio) == ("And in text?", "yes", None)
    for wrong in (names[:2], [*names, "0.wav"], [], None):
        only = write_lines(
            tmp_path / "b.jsonl", [{"conversations": said, "audios": names}, {"conversations": said, "audios": wrong}]
        )
        assert "of 3 recordings" in only_broken(only).why


def samples(*shape: int) -> list[Any]:
    import numpy as np

    return np.full(shape, 0.25).tolist()


DATA = base64.b64encode(flac(0.2, 300)).decode()


@pytest.mark.parametrize(
    "recording",
    [
        "q.wav",
        ["q.wav"],
        {"path": "q.wav"},
        {"path": "q.wav", "bytes": None},
        {"url": "q.wav"},
        {"data": DATA, "format": "flac"},
        {"bytes": DATA, "path": None},
        f"data:audio/flac;base64,{DATA[:40]}\r\n{DATA[40:]}",
        {"url": f"data:audio/flac;base64,{DATA}"},
        {"array": samples(1600), "sampling_rate": 16000},
        {"array": samples(2, 1600), "sampling_rate": 16000, "path": None},
        [{"array": samples(1600, 1), "sample_rate": 16000.0}],
        "./q.wav",
        ".\\q.wav",
        "file://",
    ],
    ids=lambda value: str(value)[:40],
)
def test_forms_of_a_recording(tmp_path, recording):
    write_tone(tmp_path / "q.wav", 0.2, 300)
    recording = f"file://{tmp_path}/q.wav" if recording == "file://" else recording
    (row,) = rows(write_lines(tmp_path / "a.jsonl", [{"question_audio": recording, "question_text": "a"}]))
    if "array" in str(recording):
        assert row.turns[0].question_audio.load(16000).tolist() == samples(1600)
    else:
        heard(row.turns[0].question_audio, 0.2, 300)


@pytest.mark.parametrize(
    "recording",
    [
        {"url": "http://x/y.wav"},
        {"data": "no base64!"},
        {"bytes": "", "path": None},
        {"array": [0.1, math.nan], "sampling_rate": 16000},
        {"array": [3000.0, 1.0], "sampling_rate": 16000},
        ["q.wav", "q.wav"],
        samples(9),
        r"C:\Users\me\q.wav",
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_recording_that_cannot_be_read_breaks_its_row(tmp_path, recording):
    write_tone(tmp_path / "q.wav", 0.2, 300)
    table = [{"question_audio": "q.wav", "question_text": "a"}, {"question_audio": recording, "question_text": "b"}]
    assert only_broken(write_lines(tmp_path / "a.jsonl", table)).where.endswith("line 2")
    chat = [{"messages": [USER, MODEL], "audio": one["question_audio"]} for one in table]
    assert only_broken(write_lines(tmp_path / "b.jsonl", chat)).where.endswith("line 2")
    without, options = rows(write_lines(tmp_path / "a.jsonl", table), audio="optional"), ReaderOptions(audio="optional")
    assert without[1].turns[0].question_text == "b" and without[1].turns[0].question_audio is None
    # what is asked in a recording is never spoken from its tag
    assert [isinstance(item, Broken) for item in open_source(tmp_path / "b.jsonl", options)] == [False, True]


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"conversations": [TOLD | {"from": "human"}, TOLD]}, {"conversations": [ASKED, TOLD]}),
        ({"question_text": "a"}, {"question_text": "a", "image": {"bytes": "iVBO", "path": None}}),
        ({"question_text": "a"}, {"question_text": "a", "audio": "q.wav"}),
        ({"question_text": "a"}, {"question_text": "<speech>"}),
        (part(type="text", text="a"), part(type="image_url", image_url={"url": "x.png"})),
    ],
    ids=str,
)
def test_what_no_reader_takes_is_refused_by_name(tmp_path, good, bad):
    write_tone(tmp_path / "q.wav", 0.2, 300)
    write_tone(tmp_path / "nowhere.wav", 0.2, 300)
    why = only_broken(write_lines(tmp_path / "a.jsonl", [good, bad])).why
    named = ("image", "video", "audio", "speech")
    assert any(name in why for name in named if name in json.dumps(bad)), why


def test_tags_of_recordings():
    for text in ("<audio>", "<Speech>", "<|AUDIO|>", "<|audio_1|>", "<sound>", "<audio_soft_token>", "<SpeechHere>"):
        assert tags(text) == 1 and tags(f"{text}{text} a") == 2 and TAG.sub("", f"{text} a").strip() == "a"
    for text in ("<|audio_bos|><|AUDIO|><|audio_eos|>", "<Speech><SpeechHere></Speech>", "<audio>a.wav</audio>"):
        assert tags(text) == 1 and TAG.sub("", text) == ""
    for text in ("<audio controls>", "audio", "<audiobook>", "a < b > c"):
        assert tags(text) == 0 and TAG.sub("", text) == text


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("format", "row"),
    [
        ("table", {"question_audio": "q.wav", "question_text": "a", "id": "i", "speaker": "s", "language": "de"}),
        ("alpaca", {"instruction": "a", "input": "b", "output": "c", "system": "d"}),
        ("cuts", {"audio_filepath": "q.wav", "duration": 0.2, "offset": 0.0, "text": "a"}),
    ],
)
def test_nan_is_missing(tmp_path, ending, bad, format, row):
    write_tone(tmp_path / "q.wav", 0.2, 300)
    write = write_lines if ending == "jsonl" else write_parquet
    for name in row:
        lacking = {key: value for key, value in row.items() if key != name}
        sets = [write_lines(tmp_path / "a.jsonl", [lacking]), write(tmp_path / f"b.{ending}", [row | {name: bad}])]
        options = ReaderOptions(format=format, name="x")
        wanted, found = ([repr(item).split("where=")[0] for item in open_source(path, options)] for path in sets)
        assert found == wanted, name


def test_columns_that_nothing_takes_are_named_and_rows_are_counted(tmp_path):
    write_tone(tmp_path / "q.wav", 0.2, 300)
    table = Path(tmp_path / "a.csv")
    table.write_text("question_audio,question_txt,answer_text,colour\nq.wav,hello,yes,red\nnowhere.wav,hello,yes,red\n")
    told = "nothing takes the columns question_txt (did you mean question_text?), colour"
    assert open_source(table).note == told
    tally = prepare(table, tmp_path / "out", PrepareConfig(workers=0))
    assert (tally.items, tally.rows, tally.broken) == (2, 1, 1)
    assert summary(tally, tmp_path / "out").endswith(told)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["items"], report["rows"], report["broken"], report["note"]) == (2, 1, 1, told)
    mapped = open_source(table, ReaderOptions(columns={"question_text": "question_txt", "id": "colour"}))
    assert mapped.note == ""


@pytest.mark.parametrize("column", ["question_adio", "Audio File", "file_name", "clip"])
def test_a_recording_in_a_column_that_nothing_takes_is_never_dropped(tmp_path, column):
    write_tone(tmp_path / "q.wav", 0.2, 300)
    table = [{"question_audio": "q.wav", "question_text": "a"}, {column: "q.wav", "question_text": "b"}]
    broken = only_broken(write_lines(tmp_path / "a.jsonl", table))
    assert broken.where.endswith("line 2") and f"--read.columns '{{question_audio: {column}}}'" in broken.why
    assert len(rows(tmp_path / "a.jsonl", audio="none")) == 2
