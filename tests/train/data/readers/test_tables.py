"""Tables of one's own, and where their recordings may lie."""

from __future__ import annotations

import pytest

from omni.errors import UserError
from tests.train.data.readers.toys import heard, only_broken, rows, write_json, write_lines, write_parquet, write_tone
from train.data.readers import Broken, ReaderOptions, open_source


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "json", "parquet"])
def test_tables_by_name_and_by_map(tmp_path, ending):
    write_tone(tmp_path / "wav/q.wav", 0.2, 300)
    write_tone(tmp_path / "wav/a.wav", 0.2, 500)
    data = [
        {"wav": "wav/q.wav", "question": "One?", "reply": "wav/a.wav", "answer_text": "Two, three."},
        dict.fromkeys(("wav", "reply"), ""),
    ]
    data[1] |= {"question": "Text?", "answer_text": "Text."}
    path = tmp_path / f"a.{ending}"
    if ending in ("csv", "tsv"):
        comma, quote = ("\t", "") if ending == "tsv" else (",", '"')
        lines = [comma.join(data[0]), *(comma.join(f"{quote}{row[name]}{quote}" for name in data[0]) for row in data)]
        path.write_text("\n".join(lines) + "\n")
    elif ending == "jsonl":
        write_lines(path, data)
    else:
        write_json(path, data) if ending == "json" else write_parquet(path, data)
    mapped = {"question_audio": "wav", "question_text": "question", "answer_audio": "reply"}
    first, second = rows(path, columns=mapped)
    heard(first.turns[0].question_audio, 0.2, 300)
    heard(first.turns[0].answer_audio, 0.2, 500)
    assert (first.turns[0].question_text, first.turns[0].answer_text) == ("One?", "Two, three.")
    assert (second.turns[0].question_text, second.turns[0].question_audio, second.turns[0].answer_text) == (
        "Text?",
        None,
        "Text.",
    )
    found = rows(path, audio="none")
    assert [row.turns[0].question_text for row in found] == ["", ""]  # not guessed: only answer_text has its name
    assert only_broken(path).why.startswith("has 'wav', a recording that is not read there: call it question_audio")
    with pytest.raises(UserError, match=r"has no column 'x': it has wav, question"):
        open_source(path, ReaderOptions(columns={"question_audio": "x"}))
    with pytest.raises(UserError, match=r"columns.*'sound'"):
        open_source(path, ReaderOptions(columns={"sound": "wav"}))


def test_an_absolute_path_may_lie_inside_the_folder_and_a_prefix_is_cut_off(tmp_path):
    write_tone(tmp_path / "wav/q.wav", 0.2, 300)
    (tmp_path / "a.csv").write_text(f"question_audio\n{tmp_path}/wav/q.wav\n/elsewhere/data/wav/q.wav\n")
    found = list(open_source(tmp_path / "a.csv"))
    assert isinstance(found[1], Broken) and "leaves the data's folder" in found[1].why and "prefix" in found[1].why
    for row in (found[0], *rows(tmp_path / "a.csv", prefix="/elsewhere/data/")):
        heard(row.turns[0].question_audio, 0.2, 300)
        assert row.turns[0].question_audio.path == "wav/q.wav"


def test_recordings_that_cannot_be_had_may_be_optional_or_left_out(tmp_path):
    write_tone(tmp_path / "q.wav")
    (tmp_path / "a.csv").write_text("question_audio,question_text\nq.wav,One?\nnone.wav,Two?\n../q.wav,Three?\nnone.wav,\n")
    kept = {}
    for audio in ("required", "optional", "none"):
        found = list(open_source(tmp_path / "a.csv", ReaderOptions(audio=audio)))
        kept[audio] = [None if isinstance(item, Broken) else item.turns[0].question_audio is not None for item in found]
    assert kept == {
        "required": [True, None, None, None],
        "optional": [True, False, False, None],
        "none": [False, False, False, None],
    }
    (tmp_path / "lists").mkdir()
    other = write_lines(tmp_path / "lists/a.jsonl", [{"question_audio": "q.wav"}])
    assert rows(other, folder=str(tmp_path))[0].turns[0].question_audio.path == "q.wav"
    with pytest.raises(UserError, match=r"nowhere\b.*does not exist"):
        open_source(other, ReaderOptions(folder=str(tmp_path / "nowhere")))


def test_numbers_are_text_and_null_is_none(tmp_path):
    path = write_lines(
        tmp_path / "a.jsonl", [{"question_text": 5, "answer_text": " five "}, {"question_text": None, "answer_text": "x"}]
    )
    assert [(r.turns[0].question_text, r.turns[0].answer_text) for r in rows(path)] == [("5", "five"), ("", "x")]


LISTED = r".*--read.format, one of voiceassistant, .*table, recordings \(a plug-in.*--plugin\)$"


@pytest.mark.parametrize(
    ("name", "held", "why"),
    [
        ("a.jsonl", "", "it is empty: name other data$"),
        ("a.json", "[1, 2]", r"it does not start with a row \(is int, not an object with fields"),
        ("a.jsonl", '{"a": "b", "prompt": "c"}', "it has the columns a, prompt; .* --read.columns '{question_text: prompt}'"),
        ("a.parquet", "PAR1", r"it does not start with a row \(is no whole Parquet file .*; fix it, or"),
        ("d/e/b.csv", "a,b\n", "its first file, e/b.csv, has the columns a, b; "),
        ("d/b.txt", "a", "it holds no file that ends in .csv"),
    ],
)
def test_data_of_no_known_format_say_what_was_found_and_what_to_do(tmp_path, name, held, why):
    (tmp_path / "d/e").mkdir(parents=True)
    (tmp_path / name).write_text(held)
    with pytest.raises(UserError, match="is of no format known here: " + (why if why.endswith("$") else why + LISTED)):
        open_source(tmp_path / name.split("/")[0])


def test_a_table_in_another_encoding_or_with_a_column_twice_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("question_text,answer_text\na,b\n", encoding="utf-16")
    with pytest.raises(UserError, match=r"a\.csv is UTF-16; save it as UTF-8"):
        open_source(path)
    path.write_text("question_text,answer_text,answer_text\na,b,c\n")
    with pytest.raises(UserError, match=r"a\.csv has the column 'answer_text' more than once"):
        open_source(path)
