"""Dialogues with slots: what rows are made of them, how evenly, what is held out, and which files are refused."""

from __future__ import annotations

import itertools
import pickle
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from omni.errors import UserError
from train.data.readers import ReaderOptions, open_source
from train.data.readers.templates.dialogues import DialogueSource
from train.data.readers.templates.sentences import NUMBERS, Wordings, spoken_number
from train.data.rows.row import Row

LIVE = Path(__file__).parents[4] / "configs/nano-live/dialogues.yaml"
WORDS = [spoken_number(number) for number in range(21)]
SMALL: dict[str, Any] = {
    "tables": {
        "digit": {"from": 0, "to": 9},
        "day": ["monday", "tuesday", "sunday"],
        "pair": [{"word": "hot", "other": "cold"}, {"word": "big", "other": "small"}],
    },
    "wordings": {"what is": "(what is | what's)"},
    "dialogues": [
        {
            "skill": "sums",
            "weight": 3,
            "slots": {"a": "digit", "b": "digit"},
            "values": {"c": {"sum": ["a", "b"], "to": 12}},
            "question": ["<what is> {a} plus {b}", "[and] {a} and {b}"],
            "answer": "{c}",
        },
        {"skill": "days", "values": {"c": {"next": "day"}}, "question": "what comes after {day}", "answer": "{c}"},
        {"skill": "opposites", "question": "not {pair.word}", "answer": "{pair.other}"},
        {
            "skill": "context",
            "slots": {"a": "digit", "b": "digit"},
            "values": {"c": {"sum": ["a", "b"]}, "d": {"double": "c"}, "r": {"reversed": ["a", "b"]}},
            "turns": [
                {"question": "my numbers are {a} {b}", "answer": "good"},
                {"question": "add them", "answer": "{c}"},
                {"question": "and twice that", "answer": "{d}"},
                {"question": "(say | read) them backwards", "answer": "{r}"},
            ],
        },
    ],
}


def write(folder: Path, data: Any = None) -> Path:
    file = folder / "dialogues.yaml"
    file.write_text(data if isinstance(data, str) else yaml.safe_dump(data or SMALL, sort_keys=False))
    return file


def rows_of(file: Path, rows: int = 1000, **options: Any) -> list[Row]:
    found = list(open_source(file, ReaderOptions(rows=rows, **options)))
    assert all(isinstance(row, Row) for row in found)
    return found  # type: ignore[return-value]


def texts(rows: list[Row], skill: str) -> list[list[tuple[str, str]]]:
    """Questions and answers of the rows of a skill."""
    return [[(t.question_text, t.answer_text) for t in row.turns] for row in rows if row.source == f"dialogues/{skill}"]


def test_rows_depend_on_file_number_and_seed_alone(tmp_path):
    file = write(tmp_path)
    rows = rows_of(file)
    assert rows == rows_of(file) and rows != rows_of(file, seed=1)
    source = pickle.loads(pickle.dumps(open_source(file, ReaderOptions(rows=1000))))
    assert source.format == "dialogues" and len(source) == 1000
    assert list(source.iterate(990, 1100)) == rows[990:] and [source.row(17)] == rows[17:18]
    assert len({row.id for row in rows}) == 1000


def test_dialogues_have_their_shares_and_come_mixed(tmp_path):
    skills = [row.source.partition("/")[2] for row in rows_of(write(tmp_path), 600)]
    assert Counter(skills) == {"sums": 300, "days": 100, "opposites": 100, "context": 100}
    assert min(Counter(skills[:100])[skill] for skill in ("sums", "days", "opposites", "context")) > 5


@pytest.mark.long
def test_every_wording_and_combination_comes_equally_often(tmp_path):
    found = texts(rows_of(write(tmp_path), 6000, part="all"), "sums")
    asked = [question for ((question, _),) in found]
    forms = Counter(re.sub("|".join(NUMBERS[:10]), "N", question) for question in asked)
    assert set(forms) == {"what is N plus N", "what's N plus N", "and N and N", "N and N"}
    assert max(forms.values()) - min(forms.values()) <= 1
    pairs = Counter(tuple(re.findall("|".join(NUMBERS[:10]), question)) for question in asked)
    wanted = {(NUMBERS[a], NUMBERS[b]) for a, b in itertools.product(range(10), repeat=2) if a + b <= 12}
    assert set(pairs) == wanted and max(pairs.values()) - min(pairs.values()) <= 1
    days = Counter(text for ((_, text),) in texts(rows_of(tmp_path / "dialogues.yaml", 700), "days"))
    assert set(days) == {"monday", "tuesday", "sunday"} and max(days.values()) - min(days.values()) <= 1


def test_held_out_combinations_are_in_no_training_row(tmp_path):
    """Questions of one kind in several dialogues hold out alike; what has one slot is always trained."""
    data = {**SMALL, "dialogues": [*SMALL["dialogues"], {**SMALL["dialogues"][0], "skill": "more"}]}
    file = write(tmp_path, data)
    trained, held = rows_of(file, 4000), rows_of(file, 1000, part="held_out")

    def numbers(rows: list[Row]) -> set[tuple[str, ...]]:
        return {tuple(re.findall("|".join(NUMBERS[:10]), row.turns[0].question_text)) for row in rows} - {()}

    assert not numbers(trained) & numbers(held)
    assert len(numbers(trained) | numbers(held)) == 100 and 4 <= len(numbers(held)) <= 20
    assert {row.source.partition("/")[2] for row in held} == {"sums", "context", "more"}
    # Neither other dialogues, nor wordings, nor the order of the file change what is held out.
    changed = {**SMALL, "dialogues": [SMALL["dialogues"][3], {**SMALL["dialogues"][0], "question": "<what is> {a} {b}"}]}
    changed["tables"] = {"digit": SMALL["tables"]["digit"]}
    assert numbers(rows_of(write(tmp_path, changed), 1000, part="held_out")) == numbers(held)


def test_context_and_facts_are_right(tmp_path):
    rows = rows_of(write(tmp_path), 2000)
    following = {"monday": "tuesday", "tuesday": "sunday", "sunday": "monday"}
    assert {q.split()[-1]: a for ((q, a),) in texts(rows, "days")} == following
    assert {q: a for ((q, a),) in texts(rows, "opposites")} == {"not hot": "cold", "not big": "small"}
    for (asked, _), (_, added), (_, doubled), (last, backwards) in texts(rows, "context"):
        a, b = asked.split()[-2:]
        assert added == spoken_number(NUMBERS.index(a) + NUMBERS.index(b))
        assert doubled == spoken_number(2 * (NUMBERS.index(a) + NUMBERS.index(b)))
        assert last in ("say them backwards", "read them backwards") and backwards == f"{b} {a}"


def test_numbers_may_have_words_of_another_language(tmp_path):
    data = {
        "numbers": ["null", "eins", "zwei", "drei"],
        "tables": {"zahl": {"from": 0, "to": 2}},
        "dialogues": [
            {"skill": "plus", "values": {"c": {"sum": ["zahl", 1]}}, "question": "{zahl} plus eins", "answer": "{c}"}
        ],
    }
    found = {q: a for ((q, a),) in texts(rows_of(write(tmp_path, data), 10, language="de"), "plus")}
    assert found == {"null plus eins": "eins", "eins plus eins": "zwei", "zwei plus eins": "drei"}
    data["tables"]["zahl"]["to"] = 3
    with pytest.raises(UserError, match=r"dialogues.0 \(plus\)\.\{c\}: 4 has no word, only 0 to 3 have"):
        rows_of(write(tmp_path, data))


@pytest.fixture(scope="module")
def live() -> DialogueSource:
    """The dialogues of nano-live, with all combinations."""
    source = open_source(LIVE, ReaderOptions(rows=2500, part="all"))
    assert isinstance(source, DialogueSource)
    return source


@pytest.mark.long
def test_the_dialogues_of_nano_live_are_right(live):
    """Every sum, difference and double, and every string read backwards, calculated here from the words of the question."""
    value = {spoken_number(number): number for number in range(41)}
    checked = Counter[str]()
    for row in live:
        skill, told, before = row.source.partition("/")[2], dict[str, str](), ""
        for turn in row.turns:
            asked, answer = turn.question_text, turn.answer_text
            assert re.fullmatch(r"[a-z']+( [a-z']+)*", asked) and re.fullmatch(r"[a-z]+( [a-z]+)*", answer)
            words = [word for word in asked.split() if word in WORDS]
            if skill in ("sums", "differences", "twice") and len(words) == 2:
                a, b = map(WORDS.index, reversed(words) if asked.startswith("take") else words)
                assert value[answer] == (a + b if "plus" in asked or "add" in asked else a - b)
                checked[skill] += 1
            if before and ("twice that" in asked or "double that" in asked):
                assert value[answer.split(" is ")[1]] == 2 * value[before.split(" is ")[-1]]
                checked["double"] += 1
            if skill in ("repeat", "backwards"):
                assert answer.split() == (words[::-1] if skill == "backwards" else words)
                checked[skill] += 1
            if re.match("my (lucky )?number is|remember the number|now my number", asked):
                told["number"] = answer.removeprefix("your number is ")
                assert asked.endswith(told["number"])
            if re.match("what (is|was) my number|tell me my number", asked):
                assert answer == (told["number"] if told or before or turn is not row.turns[0] else "you did not tell me")
                checked["my-number"] += 1
            before = answer if answer.split(" is ")[-1] in value else ""
    assert 0.4 < sum(row.source.endswith("/joined") for row in live) / len(live) < 0.6
    wanted = {"sums", "differences", "twice", "double", "repeat", "backwards", "my-number"}
    assert set(checked) == wanted and min(checked.values()) > 10


def test_joined_dialogues_come_one_after_another(tmp_path):
    one = {"skill": "a", "question": ["a", "b"], "answer": "c"}
    pair = {"skill": "d", "turns": [{"question": "d", "answer": "e"}, {"question": "f", "answer": "g"}]}
    data = {"joined": [2, 1, 1], "dialogues": [one, pair, {"skill": "h", "begins": True, "question": "i", "answer": "j"}]}
    rows = list(open_source(write(tmp_path, data), ReaderOptions(rows=900)))
    said = [" ".join(turn.question_text for turn in row.turns) for row in rows]
    assert all(re.fullmatch(r"(i|a|b|d f)( (a|b|d f)){0,2}", text) for text in said)
    counts = Counter(len(re.findall("[iab]|d f", text)) for text in said)
    assert 400 < counts[1] < 500 and 180 < counts[2] < 270 and 180 < counts[3] < 270
    assert all(
        (row.source == "dialogues/joined") == (len(re.findall("[iab]|d f", text)) > 1)
        for row, text in zip(rows, said, strict=True)
    )
    assert (
        Counter(text[0] for text in said)["i"] == Counter(text[0] for text in said)["d"] == 300
    )  # each has its share of the beginnings
    whole = {**data, "joined": [1]}
    assert all(len(row.turns) < 3 for row in open_source(write(tmp_path, whole), ReaderOptions(rows=60)))


def test_the_file_of_the_documentation_is_read(tmp_path):
    page = (LIVE.parents[2] / "docs/data.md").read_text().partition("## Dialogues of your own")[2]
    file = write(tmp_path, page.partition("```yaml\n")[2].partition("```")[0])
    skills = {row.source.partition("/")[2] for row in rows_of(file, 100)}
    assert skills == {"sums", "days", "opposites", "my-number", "small-talk"} and rows_of(file, 10, part="held_out")


@pytest.mark.parametrize(
    ("template", "wordings"),
    [
        ("what is it", ["what is it"]),
        ("(a | b) c", ["a c", "b c"]),
        ("[please] go", ["please go", "go"]),
        ("light[s] [on | off]", ["lights on", "lights off", "lights", "light on", "light off", "light"]),
        ("(a [b | c {x}] | d)", ["a b", "a c {x}", "a", "d"]),
        ("<hello> {x.y}", ["hi {x.y}", "hi there {x.y}", "hey {x.y}"]),
        ("(a | a) b", ["a b"]),
    ],
)
def test_a_template_has_these_wordings(template, wordings):
    found = Wordings({"hello": ["hi [there]", "hey"]}).expand(template)
    assert set(found) == set(wordings) and len(found) == len(wordings)


def changed(section: str = "", key: str = "", value: Any = None, **first: Any) -> dict[str, Any]:
    """The small file with changes of its first dialogue, and of a key of another section."""
    data = {**SMALL, "dialogues": [SMALL["dialogues"][0] | first, *SMALL["dialogues"][1:]]}
    return data | ({section: {**SMALL.get(section, {}), key: value}} if section else {})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (changed(question="what is {a} plus {x}"), r"dialogues.0 \(sums\).question: 'x' is no slot, value or table; "),
        (changed(answer="{pair} {c}"), r"0 \(sums\).answer: table pair has columns, and none is named: write"),
        (changed(values={"c": {"sum": ["a", "c"]}}), r"0 \(sums\).values.c: 'c' is no slot, or value before this one"),
        (changed(values={"c": {"sum": ["a", "b"], "to": -1}}), r"0 \(sums\).values: no combination .* widen them"),
        (
            changed("tables", "pair", [{"word": "hot", "other": "cold"}, {"word": "big"}]),
            r"tables.pair.1: .* columns word, other",
        ),
        (
            changed("wordings", "what is", "[and] <what is>"),
            r"wordings.what is: wordings name each other in a circle \(<what is>",
        ),
        (changed("intents"), "unknown key intents; leave it out"),
        ("{}", "dialogues is missing; give it"),
    ],
)
def test_mistakes_are_named_by_file_and_key(tmp_path, data, message):
    file = write(tmp_path, data)
    with pytest.raises(UserError, match=rf"dialogues {re.escape(str(file))}:? .*{message}"):
        open_source(file)
