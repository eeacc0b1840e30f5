"""`omni-train eval`: forms of data, interruption, refusals, VoiceBench's answers, two runs side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jiwer
import pytest
import torch

from omni.errors import UserError
from omni.files import LOCK, locked
from omni.generate.speech_lm import SpeechLM
from omni.stores.tries import StoreError
from tests.train.data.inspect.toys import codes_with_null, path_with_nul, spoilt
from tests.train.eval.toys import QUICK, noise, read_lines, save_model, voicebench, write_librispeech, write_voicebench
from train.commands.eval import main
from train.data.readers import Broken
from train.data.rows.parquet import write_rows
from train.data.rows.row import Codes, Row, RowTurn, Sound
from train.eval import journal
from train.eval.questions import Questions, open_data, readable
from train.scoring.text import find_normaliser

normalise = find_normaliser("whisper")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_librispeech(tmp_path_factory.mktemp("data") / "libri")


def run(*arguments: Any) -> int:
    return main([str(a) for a in arguments])


def report(out: Path) -> dict[str, Any]:
    return json.loads((out / "report.json").read_text())


def test_librispeech_is_transcribed(model: Path, speech: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    with locked(out), pytest.raises(UserError, match="is in use: process"):
        run(model, speech, "--out", out, *QUICK)
    assert run(model, speech, "--out", out, *QUICK) == 0
    assert not (out / LOCK).exists()
    lines = read_lines(out / "answers.jsonl")
    assert [r["index"] for r in lines] == list(range(11))
    answered = [r for r in lines if "broken" not in r]
    found = report(out)
    assert found["task"] == "A1T1" and found["answered"] == 10 and len(found["broken"]) == 1
    assert "7-1-0099.flac" in found["broken"][0]["why"] and "7-1.trans.txt line 6" in found["broken"][0]["where"]
    references, said = [[normalise(r[name]) for r in answered] for name in ("reference", "response")]
    assert found["figures"]["wer"]["value"] == pytest.approx(jiwer.wer(references, said))
    assert found["figures"]["first_text"]["questions"] == 2 and "first_audio" not in found["figures"]
    lm = SpeechLM.from_pretrained(model)
    alone = lm.generate(torch.from_numpy(noise(21)), "A1T1", max_tokens=10)
    near = next(r for r in answered if r["id"] == "7-2-0001")
    assert (near["reference"], near["response"]) == ("TWO", alone.text)
    printed = capsys.readouterr().out
    assert "word error rate" in printed and "broken rows left out: 1" in printed
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    table = (out / "report.md").read_text()
    assert "| word error rate |" in table and "whisper: openai-whisper's" in table and "7/1/7-1.trans.txt line 6" in table


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["set.parquet", "set.jsonl"])
def test_voicebench_gets_its_fields_back_in_order(model: Path, tmp_path: Path, name: str) -> None:
    rows = voicebench()
    data = write_voicebench(tmp_path / "data" / name, rows)
    out = tmp_path / "out"
    assert run(model, data, "--out", out, *QUICK, "--timed", "1") == 0
    found = report(out)
    assert (found["task"], found["format"], found["answered"], len(found["broken"])) == ("A1T2", "voicebench", 4, 1)
    assert {"wer", "exact_match", "ended", "first_text"} == set(found["figures"])
    answers = [r for r in read_lines(out / "answers.jsonl") if "broken" not in r]
    kept = [row for i, row in enumerate(rows) if i != 1]
    fields = ("prompt", "reference", "key", "instruction_id_list", "kwargs")
    assert read_lines(out / "voicebench.jsonl") == [
        {**{field: row[field] for field in fields}, "response": record["response"]}
        for row, record in zip(kept, answers, strict=True)
    ]
    assert [r["reference"] for r in answers] == [row["reference"] for row in kept]


def test_a_set_without_references_and_a_named_column(model: Path, tmp_path: Path) -> None:
    rows = [{k: v for k, v in row.items() if k != "reference"} | {"gold": "six"} for row in voicebench(3)]
    data = write_voicebench(tmp_path / "bare.parquet", rows)
    assert run(model, data, "--out", tmp_path / "a", *QUICK, "--timed", "0", "--task", "A1T2") == 0
    assert set(report(tmp_path / "a")["figures"]) == {"ended"}
    columns = ("--read.columns", "{answer_text: gold}")
    assert run(model, data, "--out", tmp_path / "b", *QUICK, "--timed", "0", "--task", "A1T2", *columns) == 0
    assert {r["reference"] for r in read_lines(tmp_path / "b" / "answers.jsonl") if "broken" not in r} == {"six"}


def test_spoken_questions_are_set_beside_written_ones_and_figures_apart_by_voice(model: Path, tmp_path: Path) -> None:
    speakers = ["espeak:en-us+f3", "Ann", "Bo", "espeak:en-us+m1", ""]
    sounds = [Sound(torch.from_numpy(noise(i)), 16000) for i in range(5)]
    rows = [Row((RowTurn(f"what {i}", sounds[i]),), id=str(i), speaker=speakers[i]) for i in range(5)]
    write_rows(tmp_path / "rows.parquet", rows)
    out, words = tmp_path / "out", (*QUICK, "--timed", "0", "--task", "A1T2", "--text", "true")
    assert run(model, tmp_path / "rows.parquet", "--out", out, *words) == 0
    found = report(out)
    assert found["figures"]["as_written"]["questions"] == 5 and "text_perplexity" not in found["figures"]
    groups = {name: figure["questions"] for name, figure in found["by_voice"].items() if name.startswith("as_written/")}
    assert groups == {"as_written/-": 1, "as_written/people": 2, "as_written/synthetic": 2}
    with pytest.raises(UserError, match="--by age: the rows have no such field; name voice or one of id, source"):
        run(model, tmp_path / "rows.parquet", "--out", out, *words, "--by", "age")
    assert run(model, tmp_path / "rows.parquet", "--out", out, *words, "--by", "speaker") == 0
    assert report(out)["by_speaker"]["ended/Ann"]["questions"] == 1
    assert "| spoken as written | Bo |" in (out / "report.md").read_text()


def test_our_rows_have_code_references_and_a_text_only_score(model: Path, tmp_path: Path) -> None:
    codes = Codes("codec2", torch.ones(4, 5, dtype=torch.long))
    sound = Sound(torch.from_numpy(noise(0)), 16000)
    rows = [Row((RowTurn(f"what {i}", sound, "that", None, codes),), id=str(i)) for i in range(4)]
    rows.append(Row((RowTurn("too long for the model", Sound(torch.zeros(16000 * 3), 16000), "x"),)))
    write_rows(tmp_path / "rows.parquet", rows)
    other = save_model(tmp_path / "other", seed=9)
    out = tmp_path / "out"
    assert run(model, tmp_path / "rows.parquet", "--out", out, *QUICK, "--text_before", other) == 0
    found = report(out)
    assert found["figures"]["code_accuracy"]["questions"] == 4
    assert "takes 2 s at once" in found["broken"][0]["why"]
    change = found["text_change"]["text_perplexity"]
    assert change["difference"]["value"] == pytest.approx(change["after"]["value"] - change["before"]["value"])
    assert change["before"]["questions"] == 5 and change["before"]["value"] != change["after"]["value"]
    # its own score is the other's before: the same model on both sides changes nothing
    again = tmp_path / "again"
    assert run(model, tmp_path / "rows.parquet", "--out", again, *QUICK, "--timed", "0", "--text_before", model) == 0
    for same in report(again)["text_change"].values():
        assert same["difference"]["value"] == same["difference"]["low"] == same["difference"]["high"] == 0


@pytest.mark.parametrize("count", [1, 4, 11, 50, None])
def test_questions_are_spread_evenly_and_can_be_entered_anywhere(speech: Path, count: int | None) -> None:
    from train.data.readers import ReaderOptions

    questions = Questions.spread(open_data(speech, ReaderOptions()), count)
    size = min(count or 11, 11)
    whole = list(questions.iterate())
    assert [index for index, _ in whole] == [i * 11 // size for i in range(size)]
    for start in range(size + 1):
        assert [index for index, _ in questions.iterate(start)] == [index for index, _ in whole[start:]]


class Pulled(Exception):
    """The plug."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("batches", [0, 1, 3])
def test_interrupted_and_gone_on_with_is_undisturbed(
    model: Path, speech: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    drawn = ("--temperature", "1.0", "--timed", "0")
    assert run(model, speech, "--out", tmp_path / "whole", *QUICK, *drawn) == 0
    append, left = journal.append, batches

    def until(file: Path, records: Any) -> None:
        nonlocal left
        if left == 0:
            with file.open("a") as handle:  # what a killed process may leave: a record, and half of one
                handle.write(json.dumps(records[0]) + '\n{"index": 7, "whe')
            raise Pulled
        left -= 1
        append(file, records)

    monkeypatch.setattr(journal, "append", until)
    with pytest.raises(Pulled):
        run(model, speech, "--out", tmp_path / "cut", *QUICK, *drawn)
    monkeypatch.setattr(journal, "append", append)
    assert run(model, speech, "--out", tmp_path / "cut", *QUICK, *drawn) == 0
    for name in ("answers.jsonl", "report.json", "report.md"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    monkeypatch.setattr(journal, "append", until)  # nothing is left to do: nothing is asked again
    assert run(model, speech, "--out", tmp_path / "cut", *QUICK, *drawn) == 0


@pytest.mark.long
@pytest.mark.parametrize("more", [(), ("--turns", "true")])
def test_a_store_that_fails_breaks_no_question(
    model: Path, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    words = ("--temperature", "1.0", "--timed", "0", "--task", "A1T2", *more)
    address = bucket.put_all(write_librispeech(tmp_path / "libri"), "libri")
    assert run(model, address, "--out", tmp_path / "whole", *QUICK, *words) == 0
    load, left = Sound.load, 5

    def failing(self: Sound, sample_rate: int) -> torch.Tensor:
        nonlocal left
        left -= 1
        if left < 0:
            raise StoreError("s3://there cannot be read")
        return load(self, sample_rate)

    monkeypatch.setattr(Sound, "load", failing)
    with pytest.raises(StoreError, match="s3://there cannot be read"):
        run(model, address, "--out", tmp_path / "cut", *QUICK, *words)
    monkeypatch.setattr(Sound, "load", load)
    assert run(model, address, "--out", tmp_path / "cut", *QUICK, *words) == 0
    for name in ("answers.jsonl", "report.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    (broken,) = (line for line in read_lines(tmp_path / "cut" / "answers.jsonl") if "broken" in line)  # it has no recording
    missing = f"{address}/7/1/7-1-0099.flac does not exist or is no file"
    assert broken["where"] == f"{address}/7/1/7-1.trans.txt line 6" and broken["broken"].endswith(missing)


def test_an_output_of_something_else_is_refused(model: Path, speech: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quick = (*QUICK, "--timed", "0", "--limit", "3")
    assert run(model, speech, "--out", out, *quick) == 0
    kept = (out / "answers.jsonl").read_bytes()
    other = save_model(tmp_path / "other", seed=4)
    with pytest.raises(UserError, match=r"was started with model \".*model\", this start has .*other"):
        run(other, speech, "--out", out, *quick)
    with pytest.raises(UserError, match=r"was started with settings"):
        run(model, speech, "--out", out, *quick, "--max_tokens", "11")
    with pytest.raises(UserError, match=r"was started with settings folder \"\", this start has \".*libri\""):
        run(model, speech, "--out", out, *quick, "--read.folder", speech)
    with pytest.raises(UserError, match=r"was started with settings prefix \"\", this start has \"/mnt\""):
        run(model, speech, "--out", out, *quick, "--read.prefix", "/mnt")
    with pytest.raises(UserError, match="was started with data"):
        run(model, write_librispeech(tmp_path / "more", 4), "--out", out, *quick)
    assert (out / "answers.jsonl").read_bytes() == kept
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="holds 'thesis.txt', but no run.json"):
        run(model, speech, "--out", tmp_path / "used", *quick)


def test_stored_rows_that_break_the_format_are_left_out(model: Path, tmp_path: Path) -> None:
    data, out = spoilt(tmp_path / "data", path_with_nul, codes_with_null), tmp_path / "out"
    for _ in range(2):  # and gone on with
        assert run(model, data, "--out", out, *QUICK, "--timed", "0", "--task", "A1T2") == 0
    found = report(out)
    assert found["answered"] == 4 and [r["where"] for r in found["broken"]] == [f"{data}/rows.parquet row {i}" for i in (2, 3)]
    assert "holds NUL" in found["broken"][0]["why"] and "NoneType" in found["broken"][1]["why"]


def test_half_a_surrogate_pair_costs_its_row(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row for i, row in enumerate(voicebench()) if i != 1]
    rows[1]["prompt"] = "what \ud83d"
    rows[2]["kwargs"] = [{"n": "\ud83d"}]  # only kept, for VoiceBench's judges
    data, out = write_voicebench(tmp_path / "data" / "set.jsonl", rows), tmp_path / "out"
    for _ in range(2):
        assert run(model, data, "--out", out, *QUICK, "--timed", "0", "--batch", "1") == 0
    found = report(out)
    assert found["answered"] == 3 and [r["where"] for r in found["broken"]] == [f"{data} line 2"]
    assert "half" in found["broken"][0]["why"] and "broken rows left out: 1" in capsys.readouterr().out
    assert read_lines(out / "voicebench.jsonl")[1]["kwargs"] == rows[2]["kwargs"]
    item = readable(Row((RowTurn("a", None, "b\udc00"),), where="here row 3"))
    assert item == Broken("here row 3", "its answer_text holds U+DC00, half of a surrogate pair: fix or drop the row")


def test_spoken_answers_are_heard(model: Path, tmp_path: Path) -> None:
    data = write_voicebench(tmp_path / "set.parquet", voicebench(3))
    out = tmp_path / "out"
    asr = ("--asr", "sphinx", "--asr_words", "[one, two, three]", "--asr_longest", "2")
    assert run(model, data, "--out", out, *QUICK, "--timed", "0", *asr) == 0
    found = report(out)
    answers = [r for r in read_lines(out / "answers.jsonl") if "broken" not in r]
    written, heard = [[normalise(r[name]) for r in answers] for name in ("response", "heard")]
    assert set(" ".join(heard).split()) <= {"one", "two", "three"}
    errors = sum(
        jiwer.process_words(w, h).wer * len(w.split()) if w else len(h.split()) for w, h in zip(written, heard, strict=True)
    )
    words = sum(len(w.split()) for w in written)
    assert found["figures"]["speech_text_wer"]["value"] == pytest.approx(errors / words)
    assert "transcribed by pocketsphinx" in (out / "report.md").read_text()
