"""`data prepare --recordings reference`: rows name recordings, which load as they are, or are refused where they changed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omni.audio.io import audio_info, read_audio
from omni.errors import UserError
from omni.stores.tries import StoreError
from tests.sounds import encoded
from train.commands.data import run_filter as filter_main
from train.commands.data import run_stats as stats_main
from train.commands.data import run_validate as validate_main
from train.data.prepare.prepare import prepare
from train.data.prepare.rows import PrepareConfig
from train.data.readers import ReaderOptions
from train.data.readers.files import cut
from train.data.rows import reference
from train.data.rows.parquet import StoredRows
from train.data.rows.reference import Reference, SoundPart


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """Recordings of several kinds, whose names need care, in a list with their texts; and cuts of the first."""
    folder, dice, lines = tmp_path / "set", np.random.default_rng(0), ["wav,said"]
    folder.mkdir()
    for number, (name, rate, channels) in enumerate(
        (("a.wav", 16000, 2), ("b #1%.flac", 16000, 1), ("é ü.ogg", 22050, 1), ("d.flac", 8000, 1))
    ):
        sound = 0.2 * dice.standard_normal((rate, channels)[: 1 + (channels > 1)])
        kind = {"wav": "WAV", "flac": "FLAC", "ogg": "OGG"}[name.rpartition(".")[2]]
        (folder / name).write_bytes(encoded(sound, kind, rate=rate))
        lines.append(f"{name},said {number} of them")
    (folder / "list.csv").write_text("\n".join(lines))
    cuts = [
        {"audio_filepath": "a.wav", "offset": 0.25, "duration": 0.5, "text": "half of it"},
        {"audio_filepath": "a.wav", "offset": 0.1, "duration": 0.2, "text": "one side", "channel_selector": 1},
        {"audio_filepath": "a.wav", "offset": 0, "duration": 1.0, "text": "all of it"},
    ]
    (tmp_path / "cuts").mkdir()
    (tmp_path / "cuts" / "cuts.jsonl").write_text("\n".join(map(json.dumps, cuts)))
    os.link(folder / "a.wav", tmp_path / "cuts" / "a.wav")
    return folder


def config(recordings: str = "reference", **more: Any) -> PrepareConfig:
    return PrepareConfig(workers=0, recordings=recordings, **more)  # type: ignore[arg-type]


def listed(clips: Path, out: Path, *args: Any, **more: Any) -> list[Any]:
    columns = {"question_audio": "wav", "question_text": "said"}
    prepare(clips / "list.csv", out, config(*args, read=ReaderOptions(columns=columns), **more))
    if "shard" in more:
        return []
    return [row.turns[0].question_audio for row in StoredRows(out, out.parent / "cache")]


def test_rows_name_their_recordings_which_load_as_they_are(clips: Path, tmp_path: Path) -> None:
    ours, copied = listed(clips, tmp_path / "out"), listed(clips, tmp_path / "copied", "copy")
    for sound, name in zip(ours, ("a.wav", "b #1%.flac", "é ü.ogg", "d.flac"), strict=True):
        named = sound.reference
        assert sound.data is None and named.address == str(clips / name) and named.size == (clips / name).stat().st_size
        assert torch.equal(sound.load(16000), read_audio(clips / name, 16000))
        assert sound.info() == audio_info(clips / name)
    assert torch.equal(ours[1].load(16000), copied[1].load(16000))  # a FLAC of this rate is copied as it is
    sizes = [sum(file.stat().st_size for file in (tmp_path / name).glob("*.parquet")) for name in ("out", "copied")]
    assert sizes[0] < sizes[1] / 10
    reports = [json.loads((tmp_path / name / "report.json").read_text()) for name in ("out", "copied")]
    assert reports[0]["question_seconds"] == reports[1]["question_seconds"] == 4.0


def test_parts_of_recordings(clips: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(tmp_path / "cuts", out, config())
    half, side, whole = (row.turns[0].question_audio for row in StoredRows(out, tmp_path / "cache"))
    assert half.reference.part == SoundPart(4000, 12000) and side.reference.part == SoundPart(1600, 4800, (1,))
    assert whole.reference.part is None and half.info().seconds == 0.5
    assert torch.equal(half.load(8000), cut(tmp_path / "cuts" / "a.wav", 0.25, 0.75).load(8000))
    assert torch.equal(side.load(16000), cut(tmp_path / "cuts" / "a.wav", 0.1, 0.3, 1).load(16000))


def test_a_reference_reads_back(tmp_path: Path) -> None:
    for address in ("s3://speech/a b#1%20.flac", "https://x.org/a%20b.wav?token=1&t=%23", "/data/a #%\udcff\n.wav"):
        for part in (None, SoundPart(3, 9), SoundPart(0, 4, (0, 2))):
            here = address.startswith("/")
            one = Reference(address, 7, "" if here else '"a#&="', 5 * here, 6 * here, part)
            str(one).encode()
            assert Reference.read(str(one)) == one
    for text in ("a.wav", "a#size=1.wav", "file:///etc/a.wav", "file:///etc/a.wav#size=4", "s3://b/a.wav", None, ""):
        assert Reference.read(text) is None
    assert Reference.read("x://a#size=b") is None


def test_preparing_again(clips: Path, tmp_path: Path) -> None:
    """Of rows that name recordings: they may be copied into rows after all."""
    listed(clips, tmp_path / "out")
    prepare(tmp_path / "out", tmp_path / "again", config("copy"))
    prepare(tmp_path / "out", tmp_path / "same", config())
    listed(clips, tmp_path / "copied", "copy")
    name = "rows-00000.parquet"
    assert (tmp_path / "again" / name).read_bytes() != (tmp_path / "out" / name).read_bytes()
    sounds = [
        [row.turns[0].question_audio.plain() for row in StoredRows(tmp_path / place, tmp_path / "cache")]
        for place in ("again", "copied", "same", "out")
    ]
    assert sounds[0] == sounds[1] and sounds[2] == sounds[3]


def test_a_recording_that_is_gone_or_another_one_is_refused(clips: Path, tmp_path: Path, capsys: Any) -> None:
    first, second, third, last = listed(clips, tmp_path / "out")
    sound = (clips / "a.wav").read_bytes()
    os.utime(clips / "a.wav", (1, 1))  # such as a copy
    assert len(first.load(16000)) == 16000
    (clips / "a.wav").write_bytes(sound[:-2] + b"\1\1")
    with pytest.raises(UserError, match=r"a.wav is not the one that the data was prepared with \(its content is another one"):
        first.load(16000)
    (clips / "b #1%.flac").write_bytes((clips / "d.flac").read_bytes())
    with pytest.raises(UserError, match=r"b #1%.flac is not the one .*it has \d+ bytes and had \d+"):
        second.info()
    (clips / "é ü.ogg").unlink()
    with pytest.raises(UserError, match=r"é ü.ogg cannot be read \(No such file or directory\): bring it back, or prepare"):
        third.load(16000)
    assert len(last.load(16000)) == 16000
    assert validate_main([str(tmp_path / "out"), "--report", str(tmp_path / "report.json"), "--progress", "off"]) == 1
    found = json.loads((tmp_path / "report.json").read_text())["findings"]
    assert found["changed_reference"]["count"] == 2 and found["missing_reference"]["count"] == 1
    assert stats_main([str(tmp_path / "out"), "--progress", "off"]) == 0
    assert "1 recordings not counted: missing reference" in capsys.readouterr().out
    (tmp_path / "rules.yaml").write_text("{}")
    assert filter_main([str(tmp_path / "out"), str(tmp_path / "kept"), "--rules", str(tmp_path / "rules.yaml")]) == 0
    (row,) = StoredRows(tmp_path / "kept", tmp_path / "cache")
    assert row.turns[0].question_audio.reference == last.reference


def test_a_file_that_changes_while_it_is_read_makes_no_row(clips: Path, tmp_path: Path, monkeypatch: Any) -> None:
    read = reference.read_audio

    def grows(source: Any, *args: Any, **more: Any) -> torch.Tensor:
        samples = read(source, *args, **more)
        if str(source).endswith("a.wav"):
            Path(source).write_bytes(Path(source).read_bytes() + b"more")
        return samples

    monkeypatch.setattr(reference, "read_audio", grows)
    assert len(listed(clips, tmp_path / "out")) == 3
    assert "a.wav is not the one that the data was prepared with" in (tmp_path / "out" / "broken.csv").read_text()


def test_recordings_of_a_bucket_are_named_by_their_addresses(
    bucket: Any, clips: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    (clips / "list.csv").unlink()
    (clips / "é ü.ogg").unlink()
    address = bucket.put_all(clips, "set")
    prepare(address, tmp_path / "out", config())
    prepare(clips, tmp_path / "here", config())
    there = [row.turns[0].question_audio for row in StoredRows(bucket.put_all(tmp_path / "out", "rows"))]
    here = [row.turns[0].question_audio for row in StoredRows(tmp_path / "here", tmp_path / "cache")]
    assert [sound.reference.address for sound in there] == [f"{address}/{n}" for n in ("a.wav", "b #1%.flac", "d.flac")]
    assert all(torch.equal(one.load(16000), other.load(16000)) for one, other in zip(there, here, strict=True))
    bucket.put("set/d.flac", (clips / "a.wav").read_bytes())
    assert torch.equal(there[2].load(16000), here[2].load(16000))  # what was named is in the cache
    monkeypatch.setenv("OMNI_CACHE", str(tmp_path / "empty"))
    with pytest.raises(UserError, match=rf"{address}/d.flac is not the recording that the data was prepared with"):
        there[2].load(16000)


@pytest.mark.long
def test_a_store_that_fails_is_no_finding(bucket: Any, clips: Path, tmp_path: Path, monkeypatch: Any) -> None:
    address = bucket.put_all(clips, "set")
    columns = {"question_audio": "wav", "question_text": "said"}
    prepare(address, tmp_path / "out", config(read=ReaderOptions(columns=columns)))
    monkeypatch.setenv("OMNI_CACHE", str(tmp_path / "empty"))
    bucket.server.broken = lambda environ: environ["PATH_INFO"].endswith("d.flac")
    (tmp_path / "rules.yaml").write_text("question_seconds: {max: 1000}")
    commands = (
        (validate_main, [str(tmp_path / "out"), "--progress", "off"]),
        (stats_main, [str(tmp_path / "out"), "--progress", "off"]),
        (filter_main, [str(tmp_path / "out"), str(tmp_path / "kept"), "--rules", str(tmp_path / "rules.yaml")]),
    )
    for command, words in commands:
        with pytest.raises(StoreError, match=rf"{address}/d.flac cannot be read: .* 6 times"):
            command(words)
    bucket.server.heal()
    assert [command(words) for command, words in commands] == [0, 0, 0]
    assert len(StoredRows(tmp_path / "kept", tmp_path / "cache")) == 4
