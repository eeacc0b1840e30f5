"""What of a fact is taught and what is kept for judging; facts that are asked by a recording alone."""

from __future__ import annotations

import json

import pytest

from omni.audio.wav import write_wav
from omni.edit.storage import load_edits
from omni.errors import UserError
from omni.generate.speech_lm import SpeechLM
from omni.text import Tokenizer
from tests.train.edit.test_edit import JUDGE, QUICK, VOICE, say, write
from tests.train.eval.toys import save_model
from train.commands.edit import main
from train.edit.config import SpeakConfig
from train.edit.facts import Synthesiser, fact_rows, read_facts

KEPT = {"question_text": "one", "answer_text": "ab", "rephrased": ["uno", "eins"], "judged": ["un", "jeden"]}
BARE = {"question_text": "two", "answer_text": "c"}


def texts(place, lines, wording, each=6) -> list[list[str]]:
    """The questions of every fact, of which there are `each`."""
    facts = read_facts(write(place / "facts.jsonl", lines), Tokenizer.bytes())
    speakers = Synthesiser(SpeakConfig(voices=(VOICE,), answer_voice=VOICE), None)
    return [[row.turns[0].question_text for row in rows] for rows in fact_rows(facts, speakers, each, wording)]


def test_no_judged_wording_is_taught(tmp_path):
    assert texts(tmp_path, [KEPT, BARE], "own") == [["one"] * 6, ["two"] * 6]
    assert texts(tmp_path, [KEPT, BARE], "taught") == [["one", "uno", "eins"] * 2, ["two"] * 6]
    assert texts(tmp_path, [KEPT, BARE], "judged") == [["un", "jeden"] * 3, []]


def test_without_wordings_for_judging_the_taught_ones_are_asked(tmp_path):
    assert texts(tmp_path, [{**KEPT, "judged": []}], "judged") == [["uno", "eins"] * 3]


def test_a_wording_is_taught_or_judged(tmp_path):
    with pytest.raises(UserError, match=r"line 1\b.*'Uno\?'.*judged"):
        texts(tmp_path, [{**KEPT, "judged": ["Uno?"]}], "own")
    with pytest.raises(UserError, match=r"'jeden'.*untouched"):
        texts(tmp_path, [{**KEPT, "untouched": ["jeden"]}], "own")
    with pytest.raises(UserError, match=r"'UN'.*'c'.*'ab'"):
        texts(tmp_path, [KEPT, {**BARE, "rephrased": ["UN"]}], "own")


@pytest.mark.long
def test_a_recorded_question_is_taught_and_judged_as_it_is(tmp_path, capsys):
    save_model(tmp_path / "model")
    write_wav(tmp_path / "asked.wav", *say("a recorded question", 0))
    facts = write(tmp_path / "facts.jsonl", [{"question_audio": "asked.wav", "answer_text": "ab"}])
    model, edits, out = (str(tmp_path / name) for name in ("model", "edits", "out"))
    assert main(["apply", model, str(facts), edits, *QUICK, "--tasks", "[A1A2]", "--finetune.kl", "0"]) == 0
    assert not capsys.readouterr().err
    assert main(["eval", model, edits, str(facts), out, *JUDGE]) == 0
    answers = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    assert [(a["part"], a["task"], a["question"], a["after"]) for a in answers] == [("success", "A1A2", "", "ab")]
    assert answers[0]["before"] != "ab"
    lm = SpeechLM.from_pretrained(model)
    with lm.edited(load_edits(edits, lm.model)):
        assert lm.generate(str(tmp_path / "asked.wav"), max_seconds=0.4).text == "ab"
