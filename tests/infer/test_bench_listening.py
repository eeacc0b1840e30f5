"""First sound after questions that were heard while they came, and after the same given whole."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from infer.bench import listening
from infer.bench.listening import listening_table
from infer.bench.random_model import random_lm, with_encoder_mode
from omni.checkpoint.folder import save_folder
from omni.errors import UserError
from omni.generate.listening import Listening
from omni.model.speech_model import SpeechModel
from omni.text import Tokenizer
from tests.infer.conftest import TINY


def test_each_length_is_heard_piece_by_piece_and_given_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []
    real = Listening.push
    monkeypatch.setattr(Listening, "push", lambda self, piece: pieces.append(len(piece)) or real(self, piece))
    ticks: Iterator[float] = iter(range(10_000))
    monkeypatch.setattr(listening.time, "sleep", lambda seconds: next(ticks))
    config = with_encoder_mode(dataclasses.replace(TINY, codec="codec2"), "chunked")
    lm = random_lm(config, torch.device("cpu"), torch.float32)
    table = listening_table(lm, "", "tiny", 1, (0.2, 0.6))
    assert "chunks of 320 ms" in table.title
    names = [row.name for row in table.rows]
    assert names[0] == "first sound after 0.2 s, heard" and names[-1] == "longest / shortest question, heard"
    assert all(row.value > 0 or (row.value == 0 and row.name.startswith("hearing")) for row in table.rows)  # no pauses: no time
    assert pieces == [320] * 2 * (10 + 30)  # of 20 ms, each question once to warm up


def test_an_encoder_that_hears_whole_questions_is_refused() -> None:
    lm = random_lm(dataclasses.replace(TINY, codec="codec2"), torch.device("cpu"), torch.float32)
    with pytest.raises(UserError, match="hears whole questions only"):
        listening_table(lm, "", "tiny", 1)


def test_the_picture_is_drawn_from_the_table_and_progress_is_no_part_of_the_output(
    run: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "LENGTHS", (0.1, 0.2))
    monkeypatch.setattr(listening_table, "__defaults__", ((0.1, 0.2),))
    monkeypatch.setattr(listening, "_first", lambda session, question: 0.01)
    model = SpeechModel(with_encoder_mode(TINY, "chunked"))
    save_folder(tmp_path / "chunked", model.config, model.state_dict(), Tokenizer.bytes())
    words = ("--model", tmp_path / "chunked", "--repeat", 1, "--kernels", "reference", "--json", "--plot", "first.png")
    done = run("bench", "--listening", *words)
    assert done.code == 0, done.err
    assert json.loads(done.out)["tables"][0]["rows"][0]["name"] == "first sound after 0.1 s, heard"
    assert "questions of 0.1, 0.2 s, 2 times each as they come and whole" in done.err.splitlines()[0]
    assert (tmp_path / "first.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_needs_something_to_draw(run: Any) -> None:
    assert "--plot draws what --sessions or --listening measures" in run("bench", "--plot", "first.png").err
    assert "end it in .png" in run("bench", "--listening", "--plot", "first.txt").err
