"""`eval --turns`: conversations are asked as a session asks them, and counted by source and turn."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from omni.generate.speech_lm import SpeechLM
from tests.train.eval.test_eval import report
from tests.train.eval.toys import QUICK, noise, save_model
from train.cli import main
from train.data.rows.parquet import write_rows
from train.data.rows.row import Row, RowTurn, Sound
from train.eval.report import figures_of_turns


def asked(number: int, answer: str = "x") -> RowTurn:
    return RowTurn(f"question {number}", Sound(torch.from_numpy(noise(number)), 16000), answer)


def test_turns_are_those_of_a_session(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_model(tmp_path / "model")
    said = []
    with SpeechLM.from_pretrained(model).session(max_tokens=10) as session:
        said = [session.ask(torch.from_numpy(noise(number)), "A1T2").answer().text for number in (1, 2, 3)]
    rows = [
        Row((asked(1, said[0]), asked(2, said[1]), asked(3, "wrong")), id="a", source="dialogues/sums"),
        Row((asked(1, said[0]),), id="b", source="dialogues/talk"),
        Row((asked(1, said[0]), RowTurn("no sound", None, "y")), id="c", source="dialogues/talk"),
        Row((asked(1, "wrong"), asked(2, said[1])), id="d", source="dialogues/sums"),
    ]
    write_rows(tmp_path / "rows.parquet", rows)
    out = tmp_path / "out"
    command = ["eval", str(model), str(tmp_path / "rows.parquet"), "--out", str(out), *QUICK, "--timed", "0", "--turns", "true"]
    assert main([*command, "--task", "A1T2"]) == 0
    records = [json.loads(line) for line in (out / "turns.jsonl").read_text().splitlines()]
    assert [turn["response"] for turn in records[0]["turns"]] == said
    assert records[2]["broken"] == "turn 1 has no question_audio, which A1T2 needs" and len(records) == 4
    shares = {(one["source"], one["turn"]): (one["exact_match"], one["questions"]) for one in report(out)["turns"]}
    sums = {("dialogues/sums", 1): (0.5, 2), ("dialogues/sums", 2): (1, 2), ("dialogues/sums", 3): (0, 1)}
    assert shares == sums | {("dialogues/talk", 1): (1, 1)}
    assert "turns, each after the model's own answers" in capsys.readouterr().out
    assert re.search(r"\| dialogues/sums \| 2 \| 100[^|]*\| [^|]*\| 2 \|", (out / "report.md").read_text())
    before = (out / "turns.jsonl").read_bytes()
    (out / "turns.jsonl").write_bytes(before[: len(before) // 2])  # as if it had been interrupted
    assert main([*command, "--task", "A1T2"]) == 0 and (out / "turns.jsonl").read_bytes() == before
    assert main([*command[:3], "--out", str(tmp_path / "none"), *command[5:], "--task", "T1A1"]) == 2
    assert "--turns compares texts, and T1A1 writes none" in capsys.readouterr().err


def test_no_records_have_no_figures() -> None:
    assert figures_of_turns([]) == figures_of_turns([{"index": 0, "broken": "why"}]) == {}
