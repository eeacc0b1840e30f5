"""Answers that are cut: their columns are those of what was heard, and their ends are not trained."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from omni.tasks import TASKS, Turn, example, prompt
from tests.test_layout import undelayed
from tests.train.data.batching.test_examples import answer_ids, row_of, turns_of
from tests.train.data.toys import MODELS, TOKENIZER, maker_of
from train.data.batching.examples import Prepared, heard, interrupted, turn_columns
from train.data.rows.row import RowTurn, Word
from train.data.seeding import seeded_rng


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("task", TASKS)
def test_answers_are_cut_but_the_last(name, task):
    """A cut answer's columns are those of what was heard, its ends are not trained, and no draw cuts a conversation's last."""
    model = MODELS[name]
    row = row_of(model, turns=2)
    maker, whole = maker_of(model, cut=1.0), maker_of(model).make(0, Prepared(row), [task] * 2).columns
    first, last = (turn_columns(model.layout, turn) for turn in turns_of(model, row, task))
    lengths = set()
    for draw in range(20):
        made = maker.make(draw, Prepared(row), [task] * 2).columns
        assert torch.equal(made.tokens, maker.make(draw, Prepared(row), [task] * 2).columns.tokens)
        begin, rest = len(prompt(model.layout, turns_of(model, row, task)[0])), len(made) - len(last)
        assert torch.equal(made.tokens[:, rest:], last.tokens) and torch.equal(made.targets[:, rest:], last.targets)
        text, codes = undelayed(model.layout, made.tokens[:, begin:rest])
        heard = replace(turns_of(model, row, task)[0], text=text.tolist(), codes=codes, cut=True)
        assert torch.equal(made.tokens[:, :rest], example(model.layout, [heard]).tokens)
        assert torch.equal(made.targets[:, :rest], example(model.layout, [heard]).targets)
        assert text.tolist() == (answer_ids(row.turns[0], task)[: len(text)] if TASKS[task].text else [])
        lengths.add(rest)
    assert len(lengths) > 1 and max(lengths) <= len(first)
    assert len(whole) == len(first) + len(last)


def test_of_a_cut_answers_text_the_words_heard_are_kept():
    words = (Word("one", 0.0, 0.2, "model"), Word("two", 0.2, 0.4, "model"), Word("say", 0.0, 0.3, "user"))
    turn = RowTurn(answer_text="one, two", words=words)
    assert [heard(turn, seconds) for seconds in (0.0, 0.05, 0.15, 0.25, 0.35, 9.0)] == [0, 0, 3, 3, 8, 8]
    assert heard(replace(turn, words=()), 0.2) is None and heard(replace(turn, answer_text="1, 2"), 0.2) is None
    whole = Turn("T1A2", question=[1], text=TOKENIZER.encode("one, two"), codes=torch.zeros(4, 10, dtype=torch.long))
    cuts = [interrupted(whole, turn, TOKENIZER, 25.0, seeded_rng(i)) for i in range(40)]
    assert {(cut.codes.shape[1], TOKENIZER.decode(cut.text)) for cut in cuts} == {
        (frames, "" if frames < 3 else "one" if frames < 8 else "one, two") for frames in range(10)
    }
