"""The text-only score: perplexities against slow ones and against transformers, before and after."""

from __future__ import annotations

from pathlib import Path

import jiwer
import pytest
import torch

from omni.generate.results import Answer, Timings
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


def test_answers_to_spoken_questions_are_set_beside_those_to_written_ones(tmp_path: Path, monkeypatch) -> None:
    written = Answer("Paris is it.", None, 0, (), None, Timings(), "end")
    monkeypatch.setattr("train.eval.against.ask", lambda lm, asked, config, sound: [written for _ in asked])
    spoken = {0: "Paris, France!", 2: "paris is it", 3: "Rome.", 4: ""}  # the last has no reference answer
    score_texts(random_lm(1), listed(), EvalConfig(batch=2), tmp_path / "text.jsonl", "off", spoken)
    records = [r for r in read_lines(tmp_path / "text.jsonl") if "broken" not in r]
    pairs = {r["index"]: [r["scores"][f"as_written{end}"] for end in ("", "_exact", "_wer")] for r in records}
    same, exact = {0: 1, 2: 1, 3: 0, 4: 0}, {0: 0, 2: 1, 3: 0, 4: 0}
    errors = {i: 3 * jiwer.wer("paris is it", said.lower().strip(".!").replace(",", "")) for i, said in spoken.items()}
    assert pairs == {i: [[same[i], 1], [exact[i], 1], [errors[i], 3]] for i in spoken}
    assert "text_perplexity" in records[0]["scores"] and "text_perplexity" not in records[3]["scores"]


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
