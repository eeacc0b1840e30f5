"""The text-only score: perplexities against slow ones and against transformers, before and after."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from omni.layout import IGNORE, Layout
from omni.tasks import Turn, example
from tests.convert.hub_toys import save_text, text_model
from tests.train.data.toys import TOKENIZER
from tests.train.eval.toys import random_lm, read_lines
from train.data.readers import Broken, OpenedSource
from train.data.rows.row import Row, RowTurn
from train.eval.against import load_before, negative_log_likelihood, plain_text, score_texts
from train.eval.config import EvalConfig
from train.eval.questions import Questions

LAYOUTS = {"codec2": Layout.preset("codec2", 256), "sampled": Layout.build([14] * 3, 256, specials=5, fill="sampled")}
TEXTS = [("what is it?", "a cat"), ("why", "because of that"), ("who", "x")]


class Listed(OpenedSource):
    """Items of a list."""

    format = "listed"

    def __init__(self, items: list[Row | Broken]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def iterate(self, start: int = 0, stop: int | None = None):
        return iter(self.items[start:stop])


def listed(texts=TEXTS, broken: bool = True) -> Questions:
    rows: list[Row | Broken] = [Row((RowTurn(q, None, a),), where=f"row {i}") for i, (q, a) in enumerate(texts)]
    if broken:
        rows.insert(1, Broken("row x", "is torn"))
        rows.append(Row((RowTurn("no answer"),), where="row y"))
    return Questions.spread(Listed(rows), None)


@torch.no_grad()
def slow_nll(lm, columns, ids: int) -> tuple[float, int]:
    """One sequence alone, one logarithm at a time."""
    hidden = lm.model(columns.tokens[None])
    logits = lm.model.decoder.logits(hidden)[-1][0].double()
    total, count = 0.0, 0
    for t, target in enumerate(columns.targets[lm.layout.n_audio].tolist()):
        if target != IGNORE:
            total -= float(torch.log(torch.softmax(logits[t, :ids], 0)[target]))
            count += 1
    return total, count


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nats_side_by_side_are_those_alone(layout: str, monkeypatch) -> None:
    lm = random_lm(3, LAYOUTS[layout])
    turns = [Turn("T1T2", question=TOKENIZER.encode(q), text=TOKENIZER.encode(a)) for q, a in TEXTS]
    size = lm.layout.text.size
    asked, plain = [example(lm.layout, [turn]) for turn in turns], [plain_text(lm, turn) for turn in turns]
    for columns, ids in ((asked, None), (plain, size)):
        wanted = [slow_nll(lm, c, ids or size + lm.layout.text.specials) for c in columns]
        for budget in (1 << 26, 2 * size):
            monkeypatch.setattr("train.eval.against._LOGITS", budget)
            together = negative_log_likelihood(lm, columns, ids)
            for (nats, count), (nats_alone, count_alone) in zip(together, wanted, strict=True):
                assert count == count_alone and nats == pytest.approx(nats_alone, rel=1e-4)
    assert [n for _, n in wanted] == [len(a) for _, a in TEXTS]  # plain: the answer's tokens and nothing else
    assert negative_log_likelihood(lm, []) == []


@pytest.mark.parametrize("family", ["qwen2", "llama3-tied"])
def test_plain_perplexity_of_a_language_model_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    theirs = text_model(family)
    folder = save_text(theirs, tmp_path / "lm")
    lm = load_before(folder, "cpu")
    score_texts(lm, listed(broken=False), EvalConfig(batch=2, max_tokens=3), tmp_path / "text.jsonl", "off")
    for record, (question, answer) in zip(read_lines(tmp_path / "text.jsonl"), TEXTS, strict=True):
        before, after = TOKENIZER.encode(question + "\n"), TOKENIZER.encode(answer)
        ids = torch.tensor([before + after])
        labels = ids.clone()
        labels[:, : len(before)] = -100
        with torch.no_grad():
            mean = theirs(input_ids=ids, labels=labels).loss
        assert record["scores"]["text_perplexity_plain"] == pytest.approx([float(mean) * len(after), len(after)], rel=1e-3)


def test_rows_are_scored_in_order_and_exact_match_is_by_the_greedy_answer(tmp_path: Path) -> None:
    lm = random_lm(1)
    said = lm.generate([q for q, _ in TEXTS], "T1T2", max_tokens=8)
    assert said[1].text.strip()
    questions = listed([(TEXTS[0]), (TEXTS[1][0], said[1].text), TEXTS[2]])
    score_texts(lm, questions, EvalConfig(batch=2, max_tokens=8), tmp_path / "text.jsonl", "off")
    records = read_lines(tmp_path / "text.jsonl")
    assert [r["index"] for r in records] == [0, 1, 2, 3, 4]
    assert records[1] == {"index": 1, "where": "row x", "broken": "is torn"}
    assert "no answer text" in records[4]["broken"]
    assert records[2]["response"] == said[1].text and records[2]["scores"]["text_exact_match"] == [1, 1]
    assert records[0]["scores"]["text_exact_match"] == [0, 1]
