"""`data filter`: the rows that rules allow, as they were and in their order, and why the others are gone."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from omni.codec import registry as codecs
from omni.errors import UserError
from omni.files import locked
from tests.train.data.inspect.toys import BAD_PARTS, beeping, noise, only_snac, row, spoilt, stored, wav
from train.commands.data import run_filter as main
from train.console.progress import percent
from train.data.inspect.checks import Bounds, Codecs, check_row
from train.data.inspect.filter import DROPPED, Range, RowFilter, Rules, WerRule, broken_rules, filter_rows, read_rules
from train.data.inspect.scan import Scan
from train.data.prepare.shards import checksum
from train.data.rows.parquet import StoredRows
from train.data.rows.row import Codes, Sound, to_plain


def rules(folder: Path, text: str) -> Path:
    (folder / "rules.yaml").write_text(text)
    return folder / "rules.yaml"


def dropped(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / DROPPED).read_text().splitlines()]


HALF_SILENT = torch.cat([torch.zeros(8000), noise(1, 1)])
RULES = {
    "question_seconds: {min: 1.05}": ("question_seconds", {"question_audio": Sound(data=wav(noise(1.0, 1)))}),
    "answer_seconds: {max: 3}": ("answer_seconds", {"answer_audio": Sound(data=wav(noise(3.2, 1))), "answer_codes": None}),
    "question_chars: {max: 20}": ("question_chars", {"question_text": "say " + "one " * 7}),
    "answer_chars: {min: 5}": ("answer_chars", {"answer_text": "a  b"}),
    "chars_per_second: {max: 20}": ("chars_per_second", {"question_audio": Sound(data=wav(noise(0.5, 1)))}),
    "silence_share: {max: 0.2}": ("silence_share", {"question_audio": Sound(data=wav(HALF_SILENT))}),
    "clipping: {max: 0}": ("clipping", {"answer_audio": Sound(data=wav(torch.ones(16000)))}),
    "languages: [en, de]": ("languages", {"language": "nl"}),
    "sources: [toy]": ("sources", {"source": "elsewhere"}),
    "speakers: [s0, s1, s2]": ("speakers", {"speaker": "who"}),
    "without_speakers: [who]": ("without_speakers", {"speaker": "who"}),
    "tasks: ['', A1A2]": ("tasks", {"task": "T1T2"}),
    "require: [answer_audio]": ("require", {"answer_audio": None}),
    "drop_duplicates: [row]": ("drop_duplicates", {}),
    "drop_duplicates: [text]": ("drop_duplicates", {"question_audio": None}),
    "drop_duplicates: [question_audio]": ("drop_duplicates", {"question_text": "another one"}),
    "{}": ("broken_sound", {"question_audio": Sound(data=b"RIFF")}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_drops_its_row_and_no_other(rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, changes = RULES[rule]
    rows = [row(i) for i in range(12)]
    rows[9] = row(3 if name == "drop_duplicates" else 9, **changes)
    data, out = stored(tmp_path / "data", rows), tmp_path / "out"
    assert main([str(data), str(out), "--rules", str(rules(tmp_path, rule))]) == 0
    (line,) = dropped(out)
    assert line["row"] == 9 and line["where"] == f"{data / 'rows-00001.parquet'} row 1" and line["id"] == rows[9].id
    assert [reason["rule"] for reason in line["reasons"]] == [name]
    kept = StoredRows(out, tmp_path / "cache")
    wanted = [to_plain(row) for i, row in enumerate(StoredRows(data, tmp_path / "cache")) if i != 9]
    assert [to_plain(row) for row in kept] == wanted
    report = json.loads((out / "report.json").read_text())
    assert report["rows"] == 11 and report["dropped"] == 1 and report["rules"] == {name: 1}
    assert [shard["crc32"] for shard in report["shards"]] == [checksum(out / "rows-00000.parquet")]
    assert "11 of 12 rows kept" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {"rows-00000.parquet", "report.json", DROPPED}


def test_broken_rows_can_be_kept_but_not_unreadable_ones(tmp_path: Path) -> None:
    rows = [row(i) for i in range(20)]
    rows[2] = row(2, question_audio=Sound(data=b"RIFF"))
    data = stored(tmp_path / "data", rows, per_file=8)
    (data / "rows-00001.parquet").write_bytes(b"PAR1")
    report = filter_rows(data, tmp_path / "out", Rules(drop_errors=False))
    assert report["rows"] == 12 and [line["reasons"][0]["rule"] for line in dropped(tmp_path / "out")] == ["unreadable"]
    again = filter_rows(tmp_path / "out", tmp_path / "again", Rules())
    assert again["rows"] == 11 and again["rules"] == {"broken_sound": 1}


@pytest.mark.parametrize("drop_errors", [True, False])
def test_bad_parts_cost_their_row_alone(drop_errors: bool, tmp_path: Path) -> None:
    data = spoilt(tmp_path / "data", *BAD_PARTS)
    report = filter_rows(data, tmp_path / "out", Rules(drop_errors=drop_errors))
    rules = {"missing_reference": 2, "word_times": 1, "unreadable": 1}
    assert report["rules"] == {name: count for name, count in rules.items() if drop_errors or name != "word_times"}
    assert report["rows"] == (4 if drop_errors else 5) and [line["row"] for line in dropped(tmp_path / "out")][:2] == [2, 3]


def test_a_link_to_an_empty_folder_is_filled(tmp_path: Path) -> None:
    data = stored(tmp_path / "data", [row(0), row(1)])
    (tmp_path / "large").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "large")
    filter_rows(data, tmp_path / "link", Rules())
    assert (tmp_path / "link").is_symlink() and (tmp_path / "large" / "rows-00000.parquet").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"data", "large", "link"}


@pytest.mark.long
@pytest.mark.parametrize("rows_per_file", [3, 50])
def test_shards_and_order(rows_per_file: int, tmp_path: Path) -> None:
    """Many shards out, few rows in each file in; every third row is dropped."""
    many = [row(i, question_audio=Sound(data=wav(noise(2.5, i)))) for i in range(100)]
    data = stored(tmp_path / "data", many, per_file=rows_per_file)
    report = filter_rows(data, tmp_path / "out", Rules(speakers=("s1", "s2")), shard_mb=1)
    assert len(report["shards"]) > 1 and sum(shard["rows"] for shard in report["shards"]) == report["rows"] == 66
    ids = [item.row.id for item in Scan(tmp_path / "out") if item.row]
    assert ids == [f"r{i}" for i in range(100) if i % 3]


def test_rows_that_fail_once_to_be_read_are_dropped_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network folder: another reading of the same rows would give others than were judged."""
    data = stored(tmp_path / "data", [row(i, language="nl" if i in (2, 13) else "en") for i in range(40)])
    calls, batches = [], pq.ParquetFile.iter_batches

    def failing(self, *args, **options):
        calls.append(1)
        if len(calls) == 2:
            raise OSError("no answer")
        return batches(self, *args, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", failing)
    report = filter_rows(data, tmp_path / "out", Rules(languages=("en",)))
    assert len(calls) == 10 and report["rules"] == {"unreadable": 4, "languages": 2} and report["dropped"] == 6
    logged = dropped(tmp_path / "out")
    assert [(line["row"], line.get("id"), line.get("count")) for line in logged] == [
        (2, "r2", None),
        (4, None, 4),
        (13, "r13", None),
    ]
    assert [each.id for each in StoredRows(tmp_path / "out")] == [f"r{i}" for i in range(40) if i not in (2, 4, 5, 6, 7, 13)]


def test_references_become_part_of_their_rows(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "clips").mkdir(parents=True)
    sound = wav(noise(1.3, "clip"))
    (data / "clips" / "a.wav").write_bytes(sound)
    stored(data, [row(0), row(1, question_audio=Sound(path="clips/a.wav", folder=data))])
    filter_rows(data, tmp_path / "elsewhere" / "out", Rules())
    kept = [item for item in Scan(tmp_path / "elsewhere" / "out") if item.plain is not None]
    assert kept[1].plain["turns"][0]["question_audio"] == {"bytes": sound, "path": None}


def test_what_stops_a_filter_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, out = stored(tmp_path / "data", [row(0), row(1)]), tmp_path / "out"
    with pytest.raises(UserError, match=r"none of the 2 rows of .* is kept: languages drops 2; loosen"):
        filter_rows(data, out, Rules(languages=("xx",)))
    gone = stored(tmp_path / "gone", [row(0, question_audio=Sound(data=b"RIFF"))])
    with pytest.raises(UserError, match="is kept: broken_sound drops 1; `omni-train data validate` names what is wrong"):
        filter_rows(gone, out, Rules())
    shutil.rmtree(gone)
    with locked(tmp_path / "out.filtering"), pytest.raises(UserError, match=r"is in use: process \d+ on .* writes into it"):
        filter_rows(data, out, Rules())
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RowFilter, "judge", lambda self, item: (_ for _ in ()).throw(KeyboardInterrupt))
        filter_rows(data, out, Rules())
    assert {path.name for path in tmp_path.iterdir()} == {"data"}
    filter_rows(data, out, Rules())
    with pytest.raises(UserError, match="exists: choose another"):
        filter_rows(data, out, Rules())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("question_second: {max: 3}", "rules.yaml: unknown key question_second; did you mean question_seconds"),
        ("turns: {max: 1}\nturns: {max: 2}", "rules.yaml line 2: turns is given again, after line 1; keep one"),
        ("question_seconds: {min: 3, max: 1}", "a rule asks for at least 3 and at most 1"),
        ("require: {", r"cannot be read \(.*\); give a YAML file"),
        ("max_wer: {question: 0.1}", "max_wer needs a Whisper"),
    ],
)
def test_rules_that_are_none(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=why) as error:
        main([str(stored(tmp_path / "d", [row(0)])), str(tmp_path / "o"), "--rules", str(rules(tmp_path, text))])
    assert "\n" not in str(error.value) and "rules.yaml" in str(error.value)
    with pytest.raises(UserError, match="do not exist"):
        read_rules(tmp_path / "none.yaml")


def test_a_turn_is_held_only_to_what_it_has() -> None:
    bare = row(0, question_audio=None, answer_audio=None, answer_codes=None, answer_text="x")
    most = Range(min=9.0)
    strict = Rules(question_seconds=most, answer_seconds=most, silence_share=most, clipping=most)
    assert not list(broken_rules(strict, bare, check_row(bare, Bounds(), Codecs())))
    full = row(0)
    assert len(list(broken_rules(strict, full, check_row(full, Bounds(), Codecs())))) == 6


class FakeASR:
    """Says the same of every sound, and remembers their lengths and languages."""

    def __init__(self, said: str) -> None:
        self.said, self.sounds = said, list[tuple[int, str]]()

    def transcribe(self, audio: torch.Tensor, sample_rate: int, language: str) -> str:
        self.sounds.append((len(audio), language))
        return self.said


def test_rows_that_are_heard_wrong_are_dropped(tmp_path: Path) -> None:
    judge = RowFilter(read_rules(rules(tmp_path, "max_wer: {question: 0.3}")), asr=FakeASR("A cat ran."))  # type: ignore[arg-type]
    assert not judge.heard(row(0, question_text="a cat ran off"))
    reason = f"question 0: word error rate {percent(1 / 3)}, the most is 30 %; heard 'A cat ran.'"
    assert judge.heard(row(0, question_text="a cat sat")) == [("max_wer", reason)]
    assert not judge.heard(row(0, question_audio=None)) and not judge.heard(row(0, question_text=""))


def test_answers_that_are_codes_only_are_heard_through_their_codec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that can never be heard cost their row alone."""
    rows = [row(0, "snac"), row(1, answer_codes=Codes("hubert", torch.zeros(1, 30, dtype=torch.int32))), row(2, "snac")]
    rows = [replace(each, turns=(replace(each.turns[0], answer_audio=None),)) for each in rows]
    asr, strict = FakeASR(rows[0].turns[0].answer_text), Rules(drop_errors=False, max_wer=WerRule(answer=9.0))
    with monkeypatch.context() as patch:
        only_snac(patch)
        judge = RowFilter(strict, Codecs(tmp_path / "snac"), asr)  # type: ignore[arg-type]
        why = [("max_wer", "answer 0: its codes are of 'hubert', which cannot be decoded here")]
        assert [judge.heard(each) for each in rows] == [[], why, []]
        with pytest.raises(UserError, match="codec snac needs a folder"):
            RowFilter(strict, Codecs(), asr).heard(rows[0])  # type: ignore[arg-type]
    asr.sounds.clear()
    monkeypatch.setitem(codecs.CODECS, "snac", beeping("snac"))
    assert not RowFilter(Rules(max_wer=WerRule(answer=0.0)), asr=asr).heard(rows[0])  # type: ignore[arg-type]
    assert asr.sounds == [(200 * rows[0].turns[0].answer_codes.frames.shape[1], "en")]  # type: ignore[union-attr]
