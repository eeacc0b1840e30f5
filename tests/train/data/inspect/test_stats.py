"""`data stats`: what is counted equals the plain count, and the pictures show it."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from omni.checkpoint.folder import save_folder
from omni.config import ModelConfig
from omni.errors import UserError
from omni.model.speech_model import SpeechModel
from omni.tasks import find_task
from tests.train.data.inspect import toys
from tests.train.data.inspect.toys import BAD_PARTS, RATE, Beeper, noise, only_snac, row, spoilt, stored, wav
from tests.train.data.toys import MODELS, TOKENIZER
from train.commands.data import run_stats as main
from train.data.batching.examples import ExampleMaker, Prepared
from train.data.inspect.checks import Codecs
from train.data.inspect.scan import Scan, Target
from train.data.inspect.stats import Collector, collect
from train.data.rows.row import Codes, Sound


def model(codec: str) -> ModelConfig:
    """A small model that speaks the codec of the rows."""
    from omni.layout import Layout

    base = MODELS["codec2" if codec == "codec2" else "mini-omni"]
    fill = base.layout.fill
    sizes = Beeper(codec).codebook_sizes
    return replace(base, layout=Layout.build(sizes, 256, specials=8, fill=fill), codec=codec)


@pytest.mark.parametrize("codec", ["codec2", "snac"])
@pytest.mark.parametrize("task", ["A1A2", "A1T1", "T1A2", "T1T2"])
def test_columns_are_those_that_training_makes(codec: str, task: str) -> None:
    config = model(codec)
    rows = [row(i, codec, question_audio=Sound(data=wav(noise(0.2 + 0.13 * i, i)))) for i in range(8)]
    rows.append(replace(rows[0], turns=(*rows[0].turns, *rows[5].turns)))
    collector = Collector(Codecs(), Target(config, TOKENIZER), (find_task(task),))
    maker, wanted = ExampleMaker(config, TOKENIZER, Beeper(codec)), []
    for each in rows:
        collector.add(each)
        wanted.append(len(maker.make(0, Prepared(each), [task] * len(each.turns)).columns))
    assert collector.done.samples[f"columns {task}"].tolist() == wanted


def test_rows_without_columns_are_said_to_be(tmp_path: Path) -> None:
    config = model("codec2")
    long = Sound(data=wav(noise(2.5, 1)))  # the encoder hears two seconds
    bad = Codes("codec2", torch.full((4, 5), 9999))
    rows = [row(0, question_audio=long), row(1, question_audio=None), row(2, task="T1T2"), row(3, answer_codes=bad), row(4)]
    config = replace(config, decoder=replace(config.decoder, context=30))
    done = collect(Scan(stored(tmp_path, rows)), Codecs(), Target(config, TOKENIZER), (find_task("A1A2"),))
    assert dict(done.noted) == {
        "rows not counted for A1A2: a question is longer than the encoder takes": 1,
        "rows that lack what A1A2 needs": 1,
        "codes not counted: codes range": 1,
        "rows of more columns than the decoder's context as A1A2": 2,
    }


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("whole_pictures")
@pytest.mark.parametrize("codec", ["codec2", "snac"])
def test_counts_equal_the_plain_counts(codec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(i, codec, source=f"from{i % 2}", language="en" if i % 4 else "nl") for i in range(12)]
    rows[5] = replace(rows[5], turns=(*rows[5].turns, *rows[6].turns))
    assert main([str(stored(tmp_path / "data", rows)), "--out", str(tmp_path / "out")]) == 0
    stats = json.loads((tmp_path / "out" / "stats.json").read_text())
    turns = [turn for each in rows for turn in each.turns]
    seconds = [(len(turn.question_audio.data) - 44) / 2 / RATE for turn in turns]  # type: ignore[union-attr, arg-type]
    assert stats["rows"] == 12 and stats["turns"] == 13
    assert stats["question_seconds"] == pytest.approx(sum(seconds)) == pytest.approx(stats["answer_seconds"])
    assert {name: group["rows"] for name, group in stats["by"]["speaker"].items()} == {"s0": 4, "s1": 4, "s2": 4}
    assert stats["by"]["source"]["from1"]["turns"] == 7 and stats["by"]["language"]["nl"]["rows"] == 3
    lengths = stats["lengths"]["question seconds"]
    assert lengths["p25"] == pytest.approx(np.percentile(seconds, 25)) and lengths["max"] == pytest.approx(max(seconds))
    said = [turn.question_text.lower() for turn in turns]
    words = [word for text in said for word in re.findall(r"[\w']+", text)]
    assert stats["texts"]["question"] == {
        "texts": 13, "distinct_texts": len(set(said)), "words": len(words), "distinct_words": len(set(words)),
        "vocabulary": sorted(set(words)),
    }  # fmt: skip
    for stream in range(len(stats["codes"][codec])):
        codes = [c for turn in turns for c in turn.answer_codes.frames[stream].tolist()]  # type: ignore[union-attr]
        entropy = -sum(n / len(codes) * math.log2(n / len(codes)) for n in Counter(codes).values())
        found = stats["codes"][codec][stream]
        assert found["entropy"] == pytest.approx(entropy) and found["frames"] == len(codes)
        assert found["used"] == pytest.approx(len(set(codes)) / found["codes"])
    out = capsys.readouterr().out
    assert "12 rows, 13 turns" in out and "by speaker" in out and "texts and their words" in out and f"codes of {codec}" in out
    pictures = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert pictures == [f"codes-{codec}.png", "durations.png", "rates.png", "stats.json", "texts.png"]
    for name in pictures:
        if name.endswith(".png"):
            pixels = np.asarray(Image.open(tmp_path / "out" / name).convert("L"))
            assert (pixels < 200).mean() > 0.01


def test_damaged_data_are_counted_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = stored(tmp_path, [row(i) for i in range(10)])
    (data / "rows-00000.parquet").write_bytes(b"PAR1")
    done = collect(Scan(data), Codecs())
    assert done.all.rows == 2 and done.noted["files or row groups that are damaged"] == 1
    file = data / "rows-00000.parquet"
    assert main([str(data)]) == 0
    assert f"\nwarning: {file}: is not a whole Parquet file (" in capsys.readouterr().out
    with pytest.raises(UserError, match=f"{file}: is not a whole Parquet file \\("):
        main([str(file)])


def test_bad_rows_are_noted_and_the_rest_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_snac(monkeypatch)
    data = spoilt(tmp_path / "data", *BAD_PARTS, toys.foreign_codes, toys.large_code)
    config = Target(model("codec2"), TOKENIZER)
    for codecs in (Codecs(), Codecs(tmp_path / "snac")):
        done = collect(Scan(data), codecs, config, (find_task("A1A2"),))
        assert done.all.rows == 9 and set(done.codes) == {"codec2", "hubert"}
        assert {
            "recordings not counted: missing reference": 2,
            "rows that break the format": 1,
            "codes not counted: of an unknown codec, and not in 0 to 1048575": 1,
            "rows not counted for A1A2: its codes are not of codec2": 2,
        }.items() <= dict(done.noted).items()
    (tmp_path / "negative").mkdir()
    minus = Codes("mystery", torch.tensor([[-5, 1]]))
    done = collect(Scan(stored(tmp_path / "negative", [row(0, answer_codes=minus)])), Codecs())
    assert not done.codes and sum(done.noted.values()) == 1


def test_models_are_named_in_one_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = str(stored(tmp_path / "data", [row(0), row(1)]))
    config = model("codec2")
    save_folder(tmp_path / "m", config, SpeechModel(config).state_dict(), TOKENIZER)
    assert main([data, "--model", str(tmp_path / "m"), "--tasks", "A1A2", "T1T2", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "columns.png").is_file()
    out = capsys.readouterr().out
    assert "columns A1A2" in out and "columns T1T2" in out and "question tokens" in out
