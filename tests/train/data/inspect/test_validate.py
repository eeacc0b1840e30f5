"""`data validate`: it finds what is wrong, each with its row, and nothing in what is right."""

from __future__ import annotations

import json
import shutil
from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from omni.errors import UserError
from tests.train.data.inspect.toys import BAD_PARTS, RATE, noise, only_snac, row, setting, spoilt, stored, wav
from train.commands.data import run_validate as main
from train.data.inspect.checks import (
    KINDS,
    BadSound,
    Bounds,
    Codecs,
    Findings,
    clipped_share,
    load,
    measure,
    silence_share,
    sound_errors,
)
from train.data.inspect.scan import Scan
from train.data.inspect.validate import repeats, shared, validate
from train.data.readers.codes import codes_kinds
from train.data.rows.row import Codes, Row, RowTurn, Sound, Word


def found(data: Path, *against: Path, bounds: Bounds | None = None) -> Findings:
    findings = Findings(examples=99)
    validate(data, against, bounds or Bounds(), Codecs(), findings)
    return findings


def with_codes(codec: str, frames: torch.Tensor, order: str = "streams") -> dict:
    return {"answer_codes": Codes(codec, frames, order)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("codec", ["codec2", "snac"])
def test_nothing_is_wrong_with_sound_rows(codec: str, tmp_path: Path) -> None:
    rows = [row(i, codec) for i in range(9)]
    rows.append(replace(row(9, codec), turns=(*row(9, codec).turns, *row(10, codec).turns)))
    assert not found(stored(tmp_path, rows)).counts


SQUARE = torch.where(torch.arange(RATE) % 40 < 20, 1.0, -1.0)
CODES = {
    "snac": Codes("snac", torch.zeros(7, 14, dtype=torch.int32)),
    "hubert": Codes("hubert", torch.zeros(1, 60, dtype=torch.int32)),
    "mimi": Codes("mimi", torch.zeros(8, 15, dtype=torch.int32)),
    "nobody's": Codes("nobody's", torch.zeros(3, 15, dtype=torch.int32)),
}
WRONG = {
    "silent_sound": {"question_audio": Sound(data=wav(torch.zeros(RATE)))},
    "mostly_silent": {"question_audio": Sound(data=wav(torch.cat([torch.zeros(RATE), noise(0.05, 1)])))},
    "clipped": {"answer_audio": Sound(data=wav(SQUARE))},
    "broken_sound": {"question_audio": Sound(data=wav(noise(1, 1))[:999])},
    "missing_reference": {"question_audio": Sound(path="clips/none.wav")},
    "unknown_task": {"task": "A1A3"},
    "unfit_row": {"task": "A1T1", "question_text": " "},
    "codes_range": with_codes("codec2", torch.tensor([[0, 3], [0, 511], [16, 2], [3, 3]])),
    "codes_shape": with_codes("codec2", torch.zeros(5, 4, dtype=torch.int32)),
    "codes_order": with_codes("codec2", torch.zeros(4, 25, dtype=torch.int32), "levels"),
    "codes_length": with_codes("snac", torch.zeros(7, 40, dtype=torch.int32), "levels"),
    "unknown_codec": with_codes("nobody's", torch.zeros(3, 25, dtype=torch.int32)),
    "word_times": {"words": (Word("say", 0.1, 0.3, "user"), Word("it", 0.2, 99.0, "model"))},
    "empty_text": {"answer_text": ""},
    "odd_text": {"answer_text": "one \ufffd two three"},
    "speech_rate": {"question_audio": Sound(data=wav(noise(0.2, 2)))},
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("place", [1, 10])
def test_each_kind_is_found_in_its_row(kind: str, place: int, tmp_path: Path) -> None:
    rows = [row(i) for i in range(12)]
    rows[place] = row(place, **WRONG[kind])
    findings = found(stored(tmp_path, rows))
    where, text = findings.shown[kind][0]
    assert findings.counts[kind] == 1 and "\n" not in text
    assert where == f"{tmp_path / f'rows-{place // 8:05d}.parquet'} row {place % 8}"
    others = set(findings.counts) - {kind}
    assert not {other for other in others if KINDS[other].severity == "error"} - {"silent_sound", "broken_sound"}


def test_bad_parts_are_found_each_in_its_row(tmp_path: Path) -> None:
    data = spoilt(tmp_path / "data", *BAD_PARTS)
    findings = found(data)
    kinds = ("missing_reference", "missing_reference", "word_times", "bad_row")
    assert findings.of("error") == len(kinds)
    for number, kind in enumerate(kinds, 2):
        (text,) = [text for where, text in findings.shown[kind] if where == f"{data / 'rows.parquet'} row {number}"]
        assert len(text) < 400
    assert findings.shown["word_times"][0][1] == "word 0, None, has no start"
    clean, other = stored(tmp_path / "clean", [row(50)]), found(stored(tmp_path / "more", [row(51)]), data)
    assert other.counts["missing_reference"] == 2 and not found(clean).counts


def test_a_recording_that_cannot_be_had_is_told_in_every_way(tmp_path: Path) -> None:
    (tmp_path / "ring").symlink_to(tmp_path / "ring")
    for name in ("a\0b", "a" * 5000, "ring", "none.wav", ""):
        for read in (load, Sound.info, Sound.file):
            with pytest.raises(BadSound) as error, sound_errors():
                read(Sound(path=name, folder=tmp_path))
            assert error.value.kind == "missing_reference" and len(str(error.value)) < 400


def test_codes_of_another_codec_than_the_weights_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_snac(monkeypatch)
    names = ("snac", "hubert", "mimi", "nobody's", "snac")
    rows = [replace(row(i), turns=(replace(row(i).turns[0], answer_codes=CODES[name]),)) for i, name in enumerate(names)]
    findings = Findings(examples=9)
    validate(stored(tmp_path, rows), (), Bounds(), Codecs(tmp_path / "snac"), findings)
    assert findings.shown["unknown_codec"] == [(f"{tmp_path}/rows-00000.parquet row 3", 'codec "nobody\'s" is not known here')]
    assert findings.counts["codes_length"] == 2  # those of the weights are judged by them
    broken = Codecs(tmp_path / "torn")
    with pytest.raises(UserError, match="torn holds no snac"):
        broken.facts("snac")
    assert broken.facts("hubert") == codes_kinds()["hubert"] and broken.facts("codec2") == codes_kinds()["codec2"]


def test_what_no_task_can_use_and_foreign_versions(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    stored(tmp_path, [row(0), Row((RowTurn(question_text="what?"),)), row(2)])
    table = pq.read_table(tmp_path / "rows-00000.parquet")
    table = table.set_column(0, "version", [[2, 2, 1]])
    pq.write_table(table.cast(pq.read_schema(tmp_path / "rows-00000.parquet")), file)
    findings = found(file)
    assert findings.shown["unfit_row"][0][0] == f"{file} row 1"
    assert findings.shown["bad_row"] == [(f"{file} row 2", "is of version 1; this is version 2: prepare the data again")]


def test_a_reference_that_leaves_the_folder(tmp_path: Path) -> None:
    data = spoilt(tmp_path / "data", setting("question_audio", {"bytes": None, "path": "../secret.wav"}))
    (tmp_path / "secret.wav").write_bytes(wav(noise(1, 5)))
    where, text = found(data).shown["escaping_reference"][0]
    assert where == f"{data / 'rows.parquet'} row 2" and "'../secret.wav' leaves the data's folder" in text


def test_duplicates_are_reported_once_each(tmp_path: Path) -> None:
    rows = [row(i) for i in range(6)]
    rows[3] = replace(rows[1], id="other")  # a row again
    rows[4] = row(4, question_audio=rows[0].turns[0].question_audio)
    rows[5] = row(5, question_text=rows[2].turns[0].question_text.upper(), answer_text=rows[2].turns[0].answer_text)
    findings, file = found(stored(tmp_path, rows)), tmp_path / "rows-00000.parquet"
    assert findings.shown["duplicate_row"] == [(f"{file} row 3", f"equals {file} row 1")]
    assert findings.shown["duplicate_audio"] == [(f"{file} row 4", f"is also in {file} row 0")]
    assert findings.shown["duplicate_text"] == [(f"{file} row 5", f"is also in {file} row 2")]
    assert findings.of("error") == 0


def test_the_same_sentence_by_several_speakers_is_no_duplicate(tmp_path: Path) -> None:
    """Nor in several recordings of which nobody says whose they are; the same speaker, or no recording at all, is."""
    texts = {"question_text": "say it", "answer_text": "it"}
    spoken = [row(i, speaker=f"s{i}", **texts) for i in range(3)] + [row(i, speaker="", **texts) for i in (3, 4)]
    pace = Bounds(chars_per_second=(0.01, 1000.0))
    assert not found(stored(tmp_path / "spoken", spoken), bounds=pace).counts
    again = [
        *spoken,
        row(5, speaker="s1", **texts),
        row(6, speaker="", **texts, question_audio=spoken[4].turns[0].question_audio),
    ]
    findings = found(stored(tmp_path / "again", again), bounds=pace)
    assert dict(findings.counts) == {"duplicate_text": 2, "duplicate_audio": 1}
    file = tmp_path / "again" / "rows-00000.parquet"
    assert [where for where, _ in findings.shown["duplicate_text"]] == [f"{file} row 5", f"{file} row 6"]
    bare = {"question_audio": None, "answer_audio": None, "answer_codes": None}
    written = [row(i, speaker=f"s{i}", **texts, **bare) for i in range(2)]
    assert found(stored(tmp_path / "written", written)).counts["duplicate_row"] == 1


@pytest.mark.parametrize("kept_as", ["wav", "flac"])
def test_leaks_between_splits(kept_as: str, tmp_path: Path) -> None:
    samples = noise(1.2, "leak")
    pcm = wav(samples)
    sound = Sound(data=pcm) if kept_as == "wav" else Sound(data=Sound(Sound(data=pcm).load(RATE), RATE).plain()["bytes"])
    train = stored(
        tmp_path / "train", [row(i, speaker=f"a{i}") for i in range(5)] + [row(5, question_audio=Sound(data=pcm), speaker="b")]
    )
    test = stored(tmp_path / "test", [row(50, question_audio=sound, speaker="b"), row(2, question_audio=None, speaker="c")])
    findings = found(train, test)
    ours, theirs = train / "rows-00000.parquet", test / "rows-00000.parquet"
    assert findings.shown["leaked_audio"] == [(f"{ours} row 5", f"is also in {theirs} row 0")]
    assert findings.shown["leaked_text"] == [(f"{ours} row 2", f"is also in {theirs} row 1")]
    assert findings.shown["leaked_speaker"] == [(f"{ours} row 5", f"speaker 'b' is also in {theirs} row 0")]
    with pytest.raises(UserError, match="compared with itself"):
        found(train, train)


def test_damaged_pages_cost_their_row_group_only(tmp_path: Path) -> None:
    stored(tmp_path, [row(i) for i in range(24)], per_file=16, row_group=4)
    file = tmp_path / "rows-00000.parquet"
    group = pq.read_metadata(file).row_group(1)
    column = next(c for c in (group.column(i) for i in range(group.num_columns)) if c.path_in_schema.endswith("question_text"))
    data = bytearray(file.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    data[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    file.write_bytes(data)
    items = list(Scan(tmp_path))
    lost = [item for item in items if item.plain is None]
    assert [(item.index, item.count) for item in lost] == [(4, 4)]
    assert lost[0].where == f"{file} row group 1, rows 4 to 7" and "damaged pages" in lost[0].why
    assert [item.index for item in items if item.plain is not None] == [*range(4), *range(8, 24)]
    assert found(tmp_path).counts == {"damaged_pages": 4}


def test_files_that_are_none_leave_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored(tmp_path, [row(i) for i in range(24)])
    first, second, third = (tmp_path / f"rows-0000{i}.parquet" for i in range(3))
    first.write_bytes(first.read_bytes()[:-100])
    pq.write_table(pq.read_table(second).drop_columns("speaker"), second)
    assert main([str(tmp_path), "--report", str(tmp_path / "r.json"), "--findings", str(tmp_path / "f.jsonl")]) == 1
    out = capsys.readouterr().out
    assert f"{first}: is not a whole Parquet file" in out and f"{second}: has no column 'speaker'" in out
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["rows_read"] == 8 and report["findings"]["unreadable_file"]["count"] == 1 + 8
    lines = [json.loads(line) for line in (tmp_path / "f.jsonl").read_text().splitlines()]
    assert [line["where"] for line in lines] == [str(first), str(second)]
    assert str(third) not in out


def test_the_sums_of_a_preparation(tmp_path: Path) -> None:
    stored(tmp_path, [row(0)])
    (tmp_path / "report.json").write_text(json.dumps({"shards": [{"file": "rows-00000.parquet", "crc32": 5}]}))
    assert found(tmp_path).counts == {"changed_file": 1}


@pytest.mark.parametrize(("bad", "code"), [(True, 1), (False, 0)])
def test_only_errors_fail(bad: bool, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored(tmp_path, [row(0), row(1, **WRONG["codes_range" if bad else "clipped"])])
    assert main([str(tmp_path)]) == code
    assert ("codes_range" if bad else "clipped") in capsys.readouterr().out


def test_bounds_are_the_users(tmp_path: Path) -> None:
    stored(tmp_path, [row(0), row(1)])
    assert found(tmp_path, bounds=Bounds(chars_per_second=(40.0, 50.0))).counts["speech_rate"] == 4
    shutil.rmtree(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        main([str(tmp_path)])


@pytest.mark.parametrize("rate", [8000, 16000])
def test_measures_of_known_sounds(rate: int) -> None:
    tone = (0.5 * torch.sin(torch.arange(rate) * 0.3) * 32768).round() / 32768
    half = torch.cat([tone, torch.zeros(rate)])
    assert silence_share(half, rate) == 0.5 and silence_share(half[:-7], rate) == 0.5 and silence_share(tone, rate) == 0
    assert clipped_share(tone) == 0
    loud = tone.clone()
    loud[100:105], loud[200:202], loud[300:303] = 1.0, 1.0, torch.tensor([1.0, -1.0, 1.0])
    assert clipped_share(loud) == pytest.approx(5 / rate)  # two samples, and three of both signs, are peaks
    assert clipped_share(torch.ones(2)) == 0 and clipped_share(-torch.ones(3)) == 1
    measured = measure(Sound(tone, rate))
    assert measured.seconds == 1 and measured.digest == measure(Sound(tone + 1e-6, rate)).digest
    assert measured.digest != measure(Sound(tone, rate // 2)).digest != measure(Sound(-tone, rate)).digest


def test_codes_are_checked_in_the_order_of_the_model() -> None:
    levels = torch.stack([torch.full((3,), i) for i in range(7)])
    assert Codecs().streams(Codes("snac", levels, "levels"))[:, 0].tolist() == [0, 1, 3, 4, 2, 5, 6]


@pytest.mark.parametrize("repeat", [1, 3])
def test_digests_equal_the_plain_search(repeat: int) -> None:
    rng = np.random.default_rng(repeat)
    a, b = rng.integers(0, 40, 60).tolist(), rng.integers(0, 40, 30).tolist()
    ours, theirs = (
        array("Q", [number for i, value in enumerate(values) for number in (value << 57, i // repeat)]) for values in (a, b)
    )
    first = [a.index(value) // repeat for value in a]
    assert list(repeats(ours)) == [(i // repeat, first[i]) for i in range(60) if first[i] != i // repeat]
    assert list(shared(ours, theirs)) == [(i // repeat, b.index(value) // repeat) for i, value in enumerate(a) if value in b]
    none = array("Q")
    assert not list(shared(ours, none)) and not list(repeats(none)) and not list(shared(none, ours))
