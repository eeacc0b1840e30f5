"""What is wrong with other people's data: each row is named with file, place and reason, and the others are read."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from tests.train.data.readers.toys import (
    RATE,
    cut,
    flac,
    llama_omni,
    lucy,
    moshi,
    only_broken,
    snac_frames,
    snac_text,
    tone,
    voice_assistant,
    write_lines,
    write_parquet,
    write_tone,
)
from train.data.readers import Broken, ReaderOptions, open_source
from train.data.readers.files import Files
from train.data.readers.records import JsonLines
from train.data.readers.source import RecordSource, RowMapper
from train.data.rows.row import Row

DAMAGED = {"empty": b"", "text": b"this is no sound at all", "header": flac(0.5, 300)[:30]}
"""Files that are no whole recording."""


def offsets(base: int, step: int) -> str:
    """Frames with base + step x place added, as text."""
    return snac_text([[code + base + step * place for place, code in enumerate(frame)] for frame in snac_frames(3, 6)])


@pytest.mark.parametrize(
    ("codes", "why"),
    [
        (offsets(0, 4096), "all of them fit packing 'layers' (0 + 4096 x place added)"),
        (offsets(128266, 4096), "all of them fit packing 'orpheus' (128266 + 4096 x place added)"),
        ("# 1 2 3 4 5 6 70000", "they reach from 1 to 70000: they are of another codec"),
        ("# 1 2 3 4 5 6 7 # 1 2 3 4 5 6", "frame 1 has 6 codes, snac has 7"),
        (f"# 1 2 3 4 5 {10**30} 7", f"code {10**30} is of no codec, nor in any packing"),
        ("# 1 2 3 four 5 6 7", "its codes hold what is no integer of a code (invalid literal for int() with base 10: 'four')"),
    ],
)
def test_codes_that_do_not_fit_are_named_by_what_would_explain_them(tmp_path, codes, why):
    rows = [voice_assistant(i) for i in range(3)]
    rows[1]["answer_snac"] = codes
    path = write_parquet(tmp_path / "a.parquet", rows)
    broken = only_broken(path)
    assert why in broken.why and broken.where == f"{path} row 1"


@pytest.mark.parametrize(("packing", "base", "step"), [("layers", 0, 4096), ("mini-omni", 0, 4160), ("orpheus", 128266, 4096)])
def test_a_packing_that_is_named_is_taken_off(tmp_path, packing, base, step):
    rows = [voice_assistant(i) | {"answer_snac": offsets(base, step)} for i in range(2)] + [voice_assistant(2)]
    path = write_parquet(tmp_path / "a.parquet", rows)
    for row in open_source(path, ReaderOptions(packing=packing)).iterate(0, 2):
        assert isinstance(row, Row) and row.turns[0].answer_codes.frames.T.tolist() == snac_frames(3, 6)
    broken = only_broken(path, packing=packing)
    assert f"as packing {packing!r} has it: all of them fit packing 'plain'" in broken.why


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (np.full(5, 6561), "code 6561 at place 0 of frame 0 is not in cosyvoice2's 0 to 6560"),
        (None, "are no whole .npy file of numbers"),
    ],
)
def test_units_that_do_not_fit(tmp_path, array, why):
    path = llama_omni(tmp_path)
    if array is None:
        (tmp_path / "units.npy").write_bytes((tmp_path / "units.npy").read_bytes()[:-9])
    else:
        np.save(tmp_path / "units.npy", array)
    assert why in only_broken(path, codec="cosyvoice2").why


def test_a_pickle_in_the_units_is_not_run(tmp_path):
    class Trap:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    path = llama_omni(tmp_path)
    np.save(tmp_path / "units.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    (tmp_path / "plain.npy").write_bytes(pickle.dumps(Trap()))
    data = json.loads(path.read_text())
    path.write_text(json.dumps([*data, data[0] | {"units": "plain.npy"}]))
    found = list(open_source(path, ReaderOptions(codec="cosyvoice2")))
    assert [isinstance(item, Broken) for item in found] == [True, False, False, True] and not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("written", "why"),
    [("1 2 3 4 5 6 7\n1 2 3\n", "codes 'wav/a1.snac': frame 1 has 3 codes, snac has 7"), (None, "'wav/a1.snac' is not there")],
)
def test_lucys_codes(tmp_path, written, why):
    path = lucy(tmp_path)
    (tmp_path / "wav/a1.snac").unlink()
    if written is not None:
        (tmp_path / "wav/a1.snac").write_text(written)
    broken = only_broken(path)
    assert why in broken.why and broken.where == f"{path} row 1"


def test_codes_of_another_recording_are_found_by_their_length(tmp_path):
    path = lucy(tmp_path)
    data = json.loads(path.read_text())
    write_tone(tmp_path / "wav/long.wav", 3.0)
    data[1]["conversations"][3]["wavpath"] = "wav/long.wav"
    path.write_text(json.dumps(data))
    assert "its snac codes last 0.34 s and the recording they belong to 3.00 s" in only_broken(path).why


@pytest.mark.parametrize("kind", ["missing", "empty", "text", "header", "folder", "no samples"])
@pytest.mark.parametrize("place", ["table", "lucy"])
def test_recordings_that_are_missing_or_damaged(tmp_path, kind, place):
    if place == "table":
        for index in range(3):
            write_tone(tmp_path / f"wav/q{index}.wav")
        path = write_lines(tmp_path / "a.jsonl", [{"question_audio": f"wav/q{i}.wav"} for i in range(3)])
    else:
        path = lucy(tmp_path)
    file = tmp_path / "wav/q1.wav"
    file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind == "no samples":
        soundfile.write(file, np.zeros(0, np.float32), RATE)
    elif kind != "missing":
        file.write_bytes(DAMAGED[kind])
    broken = only_broken(path)
    assert "q1.wav" in broken.why and broken.where.endswith("line 2" if place == "table" else "row 1")


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_recordings_inside_parquet(tmp_path, data):
    rows = [voice_assistant(i) for i in range(3)]
    rows[1]["question_audio"] = {"bytes": data, "path": None}
    rows[1]["question"] = ""
    path = write_parquet(tmp_path / "a.parquet", rows)
    assert only_broken(path).where == f"{path} row 1"


@pytest.mark.parametrize("name", ["../secret.wav", "wav/../../secret.wav", "/etc/hostname", "link.wav", "wav/link/secret.wav"])
def test_paths_may_not_leave_the_folder(tmp_path, name):
    folder = tmp_path / "data"
    write_tone(tmp_path / "secret.wav")
    write_tone(folder / "wav/q.wav")
    (folder / "link.wav").symlink_to(tmp_path / "secret.wav")
    (folder / "wav/link").symlink_to(tmp_path)
    both = ("wav/q.wav", name)
    tables = {
        "a.jsonl": [{"question_audio": path} for path in both],
        "b.jsonl": [{"audio_filepath": path, "duration": 0.2, "text": "x"} for path in both],
        "c.jsonl": [{"speech": path, "conversations": [{"from": "human", "value": "<speech>"}]} for path in both],
    }
    for file, rows in tables.items():
        broken = only_broken(write_lines(folder / file, rows))
        assert "leaves the data's folder" in broken.why and broken.where.endswith(f"{file} line 2")
    for column in ("codec", "wavpath"):
        said = {"role": "user", "content": "a"}
        rows = [{"conversations": [said]}, {"conversations": [said, {"role": "assistant", "content": "b", column: name}]}]
        assert "leaves the data's folder" in only_broken(write_lines(folder / "d.jsonl", rows)).why


@pytest.mark.parametrize(
    ("alignments", "why"),
    [
        ([["a", [3.5, 4.2], "SPEAKER_MAIN"]], "word 0 ('a') ends at 4.20 s, the recording at 4.00 s"),
        ([["a", [0.5, 0.7], "X"], ["b", [1.5, 1.0], "X"]], "word 1 ('b') goes from 1.5 to 1.0 s"),
        ([], "has no words"),
    ],
)
def test_alignments_that_do_not_fit(tmp_path, alignments, why):
    path = moshi(tmp_path, alignments)
    whole = moshi(tmp_path / "whole")
    lines = [json.loads(line) for file in (path, whole) for line in file.read_text().splitlines()]
    lines[1]["path"] = "whole/" + lines[1]["path"]
    broken = only_broken(write_lines(path, lines))
    assert why in broken.why and "a.json" in broken.why and broken.where == f"{path} line 1"


def test_an_alignment_with_half_a_character(tmp_path):
    lines = moshi(tmp_path).read_text() + moshi(tmp_path / "whole").read_text().replace("data/a", "whole/data/a")
    (tmp_path / "data.jsonl").write_text(lines)
    (tmp_path / "data/a.json").write_text(json.dumps({"alignments": [["a\ud83d", [0.5, 1.0], "SPEAKER_MAIN"]]}))
    assert "a.json is no list of [word, [start, end], speaker]" in only_broken(tmp_path / "data.jsonl").why


def test_recordings_that_do_not_fit_their_list(tmp_path):
    path = moshi(tmp_path)
    soundfile.write(tmp_path / "data/mono.wav", tone(1.0), RATE)
    soundfile.write(tmp_path / "data/alone.wav", np.zeros((RATE, 2), np.float32), RATE)
    (tmp_path / "data/torn.wav").write_bytes((tmp_path / "data/a.wav").read_bytes()[:9000])
    names = [("a", 4.0), ("mono", 1.0), ("alone", 1.0), ("a", 9.0), ("torn", 4.0), ("a", "long")]
    write_lines(path, [{"path": f"data/{name}.wav", "duration": seconds} for name, seconds in names])
    found = list(open_source(path))
    assert isinstance(found[0], Row)
    whys = ("has 1 channels, not 2", "alone.json' is not there", "the list says 9.00 s", "is truncated", "not a number")
    for item, why in zip(found[1:], whys, strict=True):
        assert isinstance(item, Broken) and why in item.why


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"start": 3.0}, "the cut goes from 3.00 to 5.00 s of a recording that lasts 4.00 s"),
        ({"channel": 2}, "channel 2 is in none of the recording's 1 files"),
        (
            {"supervisions": [{"start": 1.5, "duration": 1.0, "text": "x"}]},
            "a supervision goes from 1.50 to 2.50 s of a cut that lasts 2.00 s",
        ),
    ],
)
def test_cuts_that_do_not_fit(tmp_path, changes, why):
    path = write_lines(tmp_path / "cuts.jsonl", [cut(tmp_path), cut(tmp_path, **changes), cut(tmp_path)])
    broken = only_broken(path)
    assert why in broken.why and broken.where == f"{path} line 2"


@pytest.mark.parametrize("kind", ["command", "url", "memory"])
def test_recordings_that_are_commands_are_not_run(tmp_path, kind):
    recording = cut(tmp_path)["recording"] | {"sources": [{"type": kind, "channels": [0], "source": "touch ran"}]}
    path = write_lines(tmp_path / "cuts.jsonl", [cut(tmp_path), cut(tmp_path, recording=recording)])
    assert f"is of type '{kind}', not a file" in only_broken(path).why


def test_a_recording_shorter_than_its_manifest_says(tmp_path):
    entry = cut(tmp_path)
    soundfile.write(tmp_path / "short.wav", np.zeros((RATE, 2), np.float32), RATE)
    sources = [{"type": "file", "channels": [0, 1], "source": "short.wav"}]
    short = entry | {"recording": entry["recording"] | {"sources": sources}}
    broken = only_broken(write_lines(tmp_path / "cuts.jsonl", [entry, short]))
    assert "1.00 to 3.00 s lies beyond" in broken.why and "lasts 1.00 s" in broken.why


CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.mark.parametrize(
    ("name", "good", "bad", "why"),
    [
        ("a.jsonl", {"source_text": "a", "target_text": "b"}, {"source_text": "a"}, "has no field 'answer' or 'target_text'"),
        ("a.jsonl", {"question_text": "a"}, {"question_text": " ", "id": 1}, "turn 0 holds neither text, recording nor codes"),
        (
            "a.jsonl",
            {"conversations": [{"from": "human", "value": "a"}]},
            {"conversations": [{"from": "human", "value": "<speech>"}]},
            "its texts have tags (<audio>) of 1 recordings, 0 are there",
        ),
        ("a.jsonl", CHAT, {"messages": [{"role": "user", "content": ""}]}, "question 0 has no text"),
        ("a.tsv", "client_id\tpath\tsentence\nann\tq.wav\ta", "ann\t\tb", "has no path"),
    ],
)
def test_rows_without_what_they_need(tmp_path, name, good, bad, why):
    write_tone(tmp_path / "clips/q.wav")
    path = write_lines(tmp_path / name, [good, bad])
    broken = only_broken(path)
    assert why in broken.why and broken.where == f"{path} line {3 if name.endswith('tsv') else 2}"


def _choosy(data, where, files, options):
    if data["n"] == 1:
        raise TypeError("nobody thought\nof \ud83d")
    return Row((), where=where)


def test_an_error_that_nobody_thought_of_is_one_item(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"n": 0}, {"n": 1}, {"n": 2}])
    found = list(RecordSource("toy", [JsonLines(path)], RowMapper(_choosy, Files(tmp_path), ReaderOptions())))
    assert found[1] == Broken(f"{path} line 2", r"TypeError: nobody thought of \ud83d")
    assert isinstance(found[0], Row) and isinstance(found[2], Row)


def test_transcripts_whose_lines_are_broken(tmp_path):
    write_tone(tmp_path / "1/2/1-2-0.flac")
    (tmp_path / "1/2/1-2.trans.txt").write_bytes(b"1-2-0 A TEXT\n1-2-1 ANOTHER\n1-2-0\n../1-2-0 A TEXT\n1-2-0 \xff\n")
    found = list(open_source(tmp_path))
    assert isinstance(found[0], Row)
    whys = ("/1/2/1-2-1.flac' is not there", "is not followed by a text", "is not followed by a text", "is not UTF-8")
    for number, (item, why) in enumerate(zip(found[1:], whys, strict=True)):
        assert isinstance(item, Broken) and why in item.why and item.where.endswith(f"1-2.trans.txt line {number + 2}")
