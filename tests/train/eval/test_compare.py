"""Two runs side by side, also of questions at different places: the same ones are found, and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omni.errors import UserError
from tests.train.eval.test_eval import run
from tests.train.eval.toys import QUICK, read_lines, save_model, write_librispeech
from train.data.prepare.prepare import prepare
from train.data.prepare.rows import PrepareConfig
from train.eval.report import _matched, compare


def test_a_folder_and_the_rows_prepared_of_it(tmp_path: Path) -> None:
    """One recording is missing, so that all rows after it stand elsewhere."""
    raw = write_librispeech(tmp_path / "libri")
    prepare(raw, tmp_path / "rows", PrepareConfig(workers=0))
    model, a, b = save_model(tmp_path / "model"), tmp_path / "a", tmp_path / "b"
    assert run(model, raw, "--out", a, *QUICK) == run(model, tmp_path / "rows", "--out", b, *QUICK) == 0
    found = compare(a, b)
    assert found.common == 10 == found.changes["wer"].difference.questions
    moved = "5 of the questions have another place in B's data than in A's: matched by id, question and reference"
    assert moved in found.notes and not any("left out" in note for note in found.notes)
    said = [{r["id"]: r["response"] for r in read_lines(out / "answers.jsonl") if "broken" not in r} for out in (a, b)]
    assert said[0].keys() == said[1].keys()
    file = b / "answers.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({**line, "reference": f"not {line['reference']}"}) + "\n" for line in lines))
    with pytest.raises(UserError, match="no answered question in common"):
        compare(a, b)


@pytest.mark.long
def test_two_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, other = save_model(tmp_path / "model"), save_model(tmp_path / "other", seed=4)
    speech, a, b = write_librispeech(tmp_path / "libri"), tmp_path / "a", tmp_path / "b"
    assert run(model, speech, "--out", a, *QUICK) == 0
    assert run(other, speech, "--out", b, *QUICK, "--limit", "5") == 0
    assert run("--compare", a, b) == 0
    out = b / "compared_with_a"
    found = json.loads((out / "compare.json").read_text())
    of_b = {r["index"]: r["scores"]["wer"] for r in read_lines(b / "answers.jsonl") if "broken" not in r}
    of_a = {r["index"]: r["scores"]["wer"] for r in read_lines(a / "answers.jsonl") if r["index"] in of_b}
    rates = [sum(e for e, _ in side.values()) / sum(n for _, n in side.values()) for side in (of_a, of_b)]
    change = found["changes"]["wer"]
    assert found["common"] == len(of_b) == change["difference"]["questions"]
    assert (change["a"]["value"], change["b"]["value"]) == pytest.approx(tuple(rates))
    assert change["difference"]["value"] == pytest.approx(rates[1] - rates[0])
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert f"{10 - len(of_b)} further questions of A are left out" in (out / "compare.md").read_text()
    assert "B - A" in capsys.readouterr().out
    with (b / "answers.jsonl").open("a") as handle:  # as a killed process leaves it
        handle.write('{"index": 99, "whe')
    assert run("--compare", a, b, "--out", tmp_path / "torn") == 0
    assert (tmp_path / "torn" / "compare.json").read_bytes() == (out / "compare.json").read_bytes()
    assert run("--compare", a, a, "--out", tmp_path / "same") == 0
    same = json.loads((tmp_path / "same" / "compare.json").read_text())["changes"]
    assert all(c["difference"]["low"] == c["difference"]["high"] == 0 for c in same.values())
    with pytest.raises(UserError, match=r"nowhere holds no evaluation .it has no run.json"):
        run("--compare", a, tmp_path / "nowhere")


def record(index: int, name: str, question: str | None = "what?", reference: str | None = None) -> dict[str, Any]:
    return {"index": index, "id": name, "question": question, "reference": reference}


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ([record(0, "x"), record(1, "y")], [record(0, "y"), record(3, "x")], {0: 1, 3: 0}),
        ([record(0, "x"), record(1, "x")], [record(1, "x"), record(2, "x")], {1: 1}),  # asked twice: by its place alone
        ([record(0, "x"), record(1, "x")], [record(2, "x")], {}),
        ([record(4, "x")], [record(2, "x"), record(3, "x")], {}),
        ([record(0, "x", None)], [record(1, "x", None)], {}),  # an id alone may be a number
        ([record(1, "x", None)], [record(1, "x", None)], {1: 1}),
        ([record(0, "", None, "one")], [record(1, "", None, "one")], {1: 0}),
        ([record(0, "x", "what?", "one")], [record(1, "x", "what?", "two")], {}),
    ],
)
def test_what_is_taken_for_the_same_question(a: list[Any], b: list[Any], same: dict[int, int]) -> None:
    assert _matched(a, b) == same
