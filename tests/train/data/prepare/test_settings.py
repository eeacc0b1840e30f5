"""`data prepare`: what holds a user to the settings of an earlier start, and what does not."""

from __future__ import annotations

import pytest

from omni.errors import UserError
from tests.train.data.prepare.test_prepare import made
from tests.train.data.prepare.toys import ToySource
from train.data.prepare import rows as blocks
from train.data.prepare.prepare import discard, prepare
from train.data.prepare.rows import PrepareConfig
from train.data.readers import ReaderOptions


def test_a_start_that_failed_before_it_stored_leaves_nothing(tmp_path):
    source = tmp_path / "a.csv"
    source.write_text("question_audio,question_text,answer_text\ngone.wav,what?,that\n")
    with pytest.raises(UserError, match="none of the first 1 item makes a row"):
        prepare(source, tmp_path / "out", PrepareConfig(workers=0))
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]
    assert prepare(source, tmp_path / "out", PrepareConfig(ReaderOptions(audio="none"), workers=0)).rows == 1
    source.write_text("question_text,answer_text\n")
    with pytest.raises(UserError, match=r"\b0 items"):
        prepare(source, tmp_path / "odd", PrepareConfig(workers=0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "out"]


def test_a_start_that_stored_nothing_may_be_gone_on_with_otherwise(tmp_path, monkeypatch):
    """As a killed one leaves it, which had no time to clear up."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("train.data.prepare.prepare.discard", lambda folder: None)
        patch.setattr(blocks.BlockMaker, "__call__", _interrupted)
        made(tmp_path / "out", ToySource(40))
    assert (tmp_path / "out.preparing" / "settings.json").is_file()
    assert made(tmp_path / "out", ToySource(40), codec="") == made(tmp_path / "whole", ToySource(40), codec="")


def _interrupted(self, items):
    raise KeyboardInterrupt


def test_what_others_put_there_stays(tmp_path):
    (tmp_path / "out.preparing").mkdir()
    (tmp_path / "out.preparing" / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="none of the first 5 items"):
        made(tmp_path / "out", ToySource(5, broken=tuple(range(5))))
    assert [path.name for path in (tmp_path / "out.preparing").iterdir()] == ["thesis.txt"]
    discard(tmp_path / "nowhere")
