"""Sets of written instructions: told by themselves, every turn kept, and spoken by a preparation."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.train.data.readers.toys import RATE, alpaca, chat, llama_omni, rows, tone, write_json, write_lines, write_parquet
from train.commands.data import run_prepare as main
from train.data.readers import recognise
from train.data.rows.parquet import StoredRows
from train.data.rows.row import Row


def texts(row: Row) -> list[tuple[str, str]]:
    assert all(turn.question_audio is None and turn.answer_audio is None for turn in row.turns)
    return [(turn.question_text, turn.answer_text) for turn in row.turns]


def test_a_chat_becomes_turns(tmp_path):
    path = chat(tmp_path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    told = [[("One?", "Two.")], [("One?", "Two."), ("Three?\nOr more?", "Two.")], [("Three?\nOr more?", "")]]
    found = rows(path)
    assert [texts(row) for row in found] == told and [row.id for row in found] == ["", "b", ""]
    stored = write_parquet(
        tmp_path / "p/a.parquet", [line for line in lines if isinstance(line["messages"][0]["content"], str)][:1]
    )
    assert recognise(stored).name == "chat" and texts(rows(stored)[0]) == told[0]


@pytest.mark.parametrize("name", ["messages", "conversations"])
@pytest.mark.parametrize(
    ("who", "said", "sides"), [("role", "content", ("user", "assistant")), ("from", "value", ("human", "gpt"))]
)
def test_chats_of_other_names(tmp_path, name, who, said, sides):
    system = {who: "system", said: "Be kind."}
    path = write_json(tmp_path / "a.json", [{name: [system, {who: sides[0], said: "a"}, {who: sides[1], said: "b"}]}])
    assert texts(rows(path, format="chat")[0]) == [("a", "b")] and rows(path, format="chat")[0].system == "Be kind."
    if (name, who) != ("messages", "from"):
        assert texts(rows(path)[0]) == [("a", "b")]


def test_system_messages_are_the_row_s(tmp_path):
    """Those before the first question, joined; later ones are left out, an empty one is none; a record's own field serves."""
    asked, answered = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    first, second = {"role": "system", "content": "One."}, {"role": "developer", "content": [{"type": "text", "text": "Two."}]}
    empty = {"role": "system", "content": ""}
    records: list[dict] = [
        {"messages": [first, second, asked, answered]},
        {"messages": [first, asked, answered, second, asked, answered]},
        {"messages": [empty, asked, answered]},
        {"messages": [asked, answered], "system": "Three."},
    ]
    found = rows(write_lines(tmp_path / "a.jsonl", records))
    assert [row.system for row in found] == ["One.\n\nTwo.", "One.", "", "Three."]
    told = rows(write_lines(tmp_path / "b.jsonl", [{"instruction": "a", "output": "b", "system": "Four."}]))
    assert told[0].system == "Four."
    messages = [{"role": "system", "content": "You are Lucy."}, *(m | {"speaker": "x"} for m in (asked, answered))]
    assert rows(write_json(tmp_path / "lucy.json", [{"conversations": messages}]), format="lucy")[0].system == "You are Lucy."


def test_alpaca_joins_the_input_to_its_instruction(tmp_path):
    found = rows(alpaca(tmp_path))
    assert [texts(row) for row in found] == [
        [("Say hi.\n\nTo Bob.", "Hi!")],
        [("Say hi.", "Hi!")],
        [("One?", "Two."), ("Say hi.", "Hi!")],
    ]
    for name, delimiter in (("a.tsv", "\t"), ("a.csv", ",")):
        lines = (("instruction", "input", "output"), ("Say hi.", "To Bob.", "Hi!"))
        (tmp_path / name).write_text("".join(f"{delimiter.join(line)}\n" for line in lines))
        assert recognise(tmp_path / name).name == "alpaca"
        assert texts(rows(tmp_path / name)[0]) == [("Say hi.\n\nTo Bob.", "Hi!")]
    mapped = rows(tmp_path / "a.csv", columns={"question_text": "input", "answer_text": "output"})
    assert texts(mapped[0]) == [("To Bob.", "Hi!")]
    own = write_lines(tmp_path / "own.jsonl", [{"instruction": "a", "output": "b", "question_text": "c", "answer_text": "d"}])
    assert recognise(own).name == "table" and texts(rows(own)[0]) == [("c", "d")]


def spoken(text: str) -> tuple[np.ndarray, int]:
    """A voice: a tone, the longer the more letters."""
    return tone(len(text) / 160), RATE


@pytest.mark.parametrize("kind", [chat, alpaca])
def test_a_preparation_speaks_them(tmp_path, kind):
    voice = ["--speak", "question,answer", "--voice", "tests.train.data.readers.test_texts:spoken"]
    assert main([str(kind(tmp_path)), str(tmp_path / "out"), "--workers", "0", "--progress", "off", *voice]) == 0
    stored = StoredRows(tmp_path / "out")
    assert len(stored) == 3 and stored[0].system == ("You are kind." if kind is chat else "")
    for index in range(3):
        for turn in stored[index].turns:
            for said, sound in ((turn.question_text, turn.question_audio), (turn.answer_text, turn.answer_audio)):
                assert (sound is not None) == bool(said)
                if sound is not None:
                    assert len(sound.load(16000)) == 100 * len(said)


def test_names_of_roles_and_system_messages_of_speech_sets(tmp_path):
    path = llama_omni(tmp_path)
    data = json.loads(path.read_text())
    wanted = rows(path, codec="cosyvoice2")
    other = {"human": "user", "gpt": "assistant"}
    for row in data:
        row["conversations"] = [message | {"from": other[message["from"]]} for message in row["conversations"]]
        row["conversations"].insert(0, {"from": "system", "value": "You are kind."})
    found = rows(write_json(tmp_path / "other.json", data), codec="cosyvoice2")
    for row, same in zip(found, wanted, strict=True):
        assert (row.system, same.system) == ("You are kind.", "")
        assert [(t.question_text, t.answer_text, t.question_audio) for t in row.turns] == [
            (t.question_text, t.answer_text, t.question_audio) for t in same.turns
        ]
    codes = found[0].turns[0].answer_codes
    assert codes is not None and codes.frames.tolist() == wanted[0].turns[0].answer_codes.frames.tolist()
