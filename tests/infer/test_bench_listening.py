"""First sound after questions that were heard while they came, and after the same given whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from infer.bench import listening
from infer.bench.listening import listening_table
from infer.bench.random_model import random_lm, with_encoder_mode
from omni.errors import UserError
from omni.generate.listening import Listening
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
    assert all(row.value > 0 for row in table.rows)
    assert pieces == [320] * 2 * (10 + 30)  # of 20 ms, each question once to warm up


def test_an_encoder_that_hears_whole_questions_is_refused() -> None:
    lm = random_lm(dataclasses.replace(TINY, codec="codec2"), torch.device("cpu"), torch.float32)
    with pytest.raises(UserError, match="hears whole questions only"):
        listening_table(lm, "", "tiny", 1)
