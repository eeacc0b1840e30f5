"""Readers of other people's formats: each row against what the format's book says, each slice against the whole."""

from __future__ import annotations

import gzip
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omni.errors import UserError
from tests.train.data.readers.toys import (
    RATE,
    common_voice,
    cut,
    flac,
    heard,
    librispeech,
    llama_omni,
    lucy,
    make,
    moshi,
    noise,
    recordings,
    rows,
    snac_frames,
    tone,
    voice_assistant,
    write_lines,
    write_parquet,
    write_tone,
)
from train.data.readers import READERS, Broken, ReaderOptions, open_source, recognise
from train.data.readers.files import list_files
from train.data.rows.row import Row


@pytest.mark.parametrize("kind", list(READERS))
def test_formats_are_recognised_and_any_slice_is_a_slice_of_all(tmp_path, kind):
    path = make(kind, tmp_path / "d")
    assert recognise(path).name == kind
    source = open_source(path, ReaderOptions(codec="cosyvoice2" if kind == "llama-omni" else "", rows=5))
    found = list(source)
    assert source.format == kind and len(source) == len(found) > 0
    assert all(isinstance(item, Row) and item.source.partition("/")[0] == kind for item in found)
    copy = pickle.loads(pickle.dumps(source))
    for start in range(len(found) + 2):
        for stop in (start, start + 2, None):
            assert places(copy.iterate(start, stop)) == places(found[start:stop])


def places(found: Any) -> list[str]:
    return [item.where for item in found]


def test_rows_of_several_files_are_one_list(tmp_path):
    for name, part in (("b", range(3, 4)), ("a", range(3)), ("c/d", range(4, 9))):
        write_parquet(tmp_path / f"{name}.parquet", [voice_assistant(i) for i in part], 2)
    (tmp_path / "aa.parquet").write_bytes(b"PAR1 and no more")
    source = open_source(tmp_path)
    found = [item.id if isinstance(item, Row) else "broken" for item in source]
    assert found == [*(f"identity-{i}-1" for i in range(3)), "broken", *(f"identity-{i}-1" for i in range(3, 9))]
    for start in range(11):
        for stop in range(start, 12):
            assert [item.id if isinstance(item, Row) else "broken" for item in source.iterate(start, stop)] == found[start:stop]


def test_voice_assistant(tmp_path):
    source = open_source(make("voiceassistant", tmp_path))
    assert "order streams" in source.note
    for index, row in enumerate(rows(tmp_path)):
        (turn,) = row.turns
        assert row.id == f"identity-{index}-1"
        assert (turn.question_text, turn.answer_text) == (f"Question {index}?", f"Answer {index}.")
        heard(turn.question_audio, 0.1, 200 + index)
        assert turn.answer_codes.codec == "snac" and turn.answer_codes.order == "streams" and turn.answer_audio is None
        assert turn.answer_codes.frames.tolist() == [list(column) for column in zip(*snac_frames(index), strict=True)]
    (row, *_) = rows(tmp_path, order="levels", language="zh", name="VA", task="A1A2")
    assert row.turns[0].answer_codes.order == "levels" and (row.language, row.source, row.task) == ("zh", "VA", "A1A2")


@pytest.mark.parametrize(
    ("question", "turns"),
    [
        ("Plain?", [("Plain?", "A.")]),
        ("<USER>: One?", [("One?", "A.")]),
        ("USER: One? ASSISTANT: Two: 2. <USER>: Three?", [("One?", "Two: 2."), ("Three?", "A.")]),
        ("<USER>: a <ASSISTANT>: b <USER>: c <ASSISTANT>: d <USER>: e", [("a", "b"), ("c", "d"), ("e", "A.")]),
        ("What does USER: mean?", [("What does USER: mean?", "A.")]),
    ],
)
def test_slam_omni_and_its_history(tmp_path, question, turns):
    write_tone(tmp_path / "q.wav", 0.2, 300)
    path = write_lines(
        tmp_path / "a.jsonl",
        [{"key": "k", "source_wav": "q.wav", "source_text": question, "target_text": "A.", "target_token": [1, 2, 4095]}],
    )
    parquet = {"split_name": "s", "index": 3, "round": 2, "question": question, "answer": "A."}
    parquet |= {"question_audio": {"bytes": flac(0.2, 300), "path": None}, "answer_cosyvoice_speech_token": [1, 2, 4095]}
    write_parquet(tmp_path / "a.parquet", [parquet])
    for file, name in ((path, "k"), (tmp_path / "a.parquet", "s-3-2")):
        (row,) = rows(file)
        assert [(turn.question_text, turn.answer_text) for turn in row.turns] == turns and row.id == name
        assert all(turn.question_audio is None and turn.answer_codes is None for turn in row.turns[:-1])
        heard(row.turns[-1].question_audio, 0.2, 300)
        assert row.turns[-1].answer_codes.codec == "cosyvoice" and row.turns[-1].answer_codes.frames.tolist() == [[1, 2, 4095]]


def test_slam_omni_with_snac_beside_takes_the_codec_asked_for(tmp_path):
    row = voice_assistant(0) | {"answer_cosyvoice_speech_token": [1, 2]}
    path = write_parquet(tmp_path / "a.parquet", [row])
    assert rows(path)[0].turns[0].answer_codes.codec == "snac"
    assert rows(path, codec="cosyvoice", format="slam-omni")[0].turns[0].answer_codes.frames.tolist() == [[1, 2]]


def test_lucy(tmp_path):
    found = rows(lucy(tmp_path))
    assert [[(t.question_text, t.answer_text) for t in row.turns] for row in found] == [
        [("eins?", "zwei")],
        [("eins?", "zwei"), ("drei?", "vier")],
        [("eins?", "")],
    ]
    for row in found:
        for index, turn in enumerate(row.turns):
            heard(turn.question_audio, 0.2, 300 + index)
    first, second = found[1].turns
    heard(first.answer_audio, 0.4, 500)
    assert first.answer_codes.order == second.answer_codes.order == "levels" and second.answer_audio is None
    for index, turn in enumerate((first, second)):
        assert torch.equal(turn.answer_codes.frames, torch.tensor(snac_frames(index), dtype=torch.int32).T)


def test_llama_omni(tmp_path):
    path = llama_omni(tmp_path)
    a, b, c = rows(path, codec="cosyvoice2")
    assert [(t.question_text, t.answer_text) for row in (a, b, c) for t in row.turns] == [
        ("", "One."),
        ("", "1"),
        ("", ""),
        ("In text?", "Yes."),
    ]
    for index, turn in enumerate((*a.turns, *b.turns)):
        heard(turn.question_audio, 0.2, 300 + index)
    assert a.turns[0].answer_codes.frames.tolist() == [[i * 7 for i in range(10)]]
    assert c.turns[0].answer_codes.frames.tolist() == [[1, 2]] and b.turns[0].answer_codes is None
    first, _, third = open_source(path)
    assert isinstance(first, Broken) and isinstance(third, Broken) and first.where == f"{path} row 0"
    assert "codes of a codec that the format does not name" in first.why


def test_moshi_turns_are_cut_by_their_words(tmp_path):
    (row,) = rows(moshi(tmp_path))
    assert [(t.question_text, t.answer_text) for t in row.turns] == [("how now?", "fine thanks"), ("bye", "ciao")]
    for turn in row.turns:
        heard(turn.question_audio, 0.5, 300)
        heard(turn.answer_audio, 0.5, 500)
    assert [(t.question_start, t.answer_start) for t in row.turns] == [(0.5, 1.5), (2.5, 3.5)]
    words = [(w.text, round(w.start, 6), round(w.end, 6), w.who) for w in row.turns[0].words]
    assert words == [
        ("how", 0.0, 0.2, "user"),
        ("now?", 0.3, 0.5, "user"),
        ("fine", 0.0, 0.2, "model"),
        ("thanks", 0.25, 0.5, "model"),
    ]


def test_moshi_without_the_users_words_takes_what_sounds_between(tmp_path):
    path = moshi(tmp_path, [["fine", [1.5, 2.0], "SPEAKER_MAIN"], ["ciao", [3.5, 4.0], "SPEAKER_MAIN"]])
    (row,) = rows(path)
    assert [(t.question_text, t.answer_text, t.question_start) for t in row.turns] == [("", "fine", 0.0), ("", "ciao", 2.0)]
    assert [len(t.question_audio.load(RATE)) / RATE for t in row.turns] == [1.5, 1.5]
    np.testing.assert_allclose(row.turns[0].question_audio.load(RATE).numpy()[RATE // 2 : RATE], tone(0.5, 300), atol=2 / 32768)


def test_moshi_speakers_who_pause_or_talk_at_once_keep_their_order(tmp_path):
    words = [
        ["a", [0.0, 0.2], "SPEAKER_MAIN"],  # the model starts: a turn without a question
        ["b", [0.5, 0.7], "SPEAKER_OTHER"],
        ["c", [2.0, 2.2], "SPEAKER_OTHER"],  # after a pause, still the question
        ["d", [2.1, 2.4], "SPEAKER_MAIN"],  # cuts in
        ["e", [2.3, 2.35], "SPEAKER_OTHER"],  # no pause since c: of the same utterance
        ["f", [3.9, 4.05], "SPEAKER_MAIN"],  # a little beyond the end, as recognisers have it
    ]
    (row,) = rows(moshi(tmp_path, words), pause=1.0)
    assert [(t.question_text, t.answer_text) for t in row.turns] == [("", "a"), ("b c e", "d f")]
    assert row.turns[0].question_audio is None and row.turns[1].answer_start == 2.1
    assert len(row.turns[1].answer_audio.samples) == round(1.9 * RATE)


def test_cuts_choose_their_stretch_and_channel(tmp_path):
    nemo = {"audio_filepath": "long.wav", "offset": 0.5, "duration": 1.0, "text": "nemo", "channel_selector": 0}
    cuts = [cut(tmp_path), cut(tmp_path, channel=1, start=0.5), nemo]
    path = write_lines(tmp_path / "cuts.jsonl", cuts)
    (tmp_path / "cuts.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    for file in (path, tmp_path / "cuts.jsonl.gz"):
        found = rows(file)
        assert [(r.id, r.speaker, r.language, r.turns[0].question_text) for r in found] == [
            ("c", "ann", "de", "hi"),
            ("c", "ann", "de", "hi"),
            ("long.wav@0.5-1.5#0", "", "en", "nemo"),
        ]
        for row, (start, seconds, seed) in zip(found, ((1.0, 2.0, 0), (0.5, 2.0, 1), (0.5, 1.0, 0)), strict=True):
            wanted = noise(4.0, seed)[round(start * RATE) : round((start + seconds) * RATE)]
            np.testing.assert_allclose(row.turns[0].question_audio.load(RATE).numpy(), wanted, atol=2 / 32768)


def test_cuts_of_two_speakers_become_turns(tmp_path):
    def said(start: float, seconds: float, text: str, speaker: str, channel: int = 0) -> dict[str, Any]:
        return {"start": start, "duration": seconds, "text": text, "speaker": speaker, "channel": channel}

    sources = [{"type": "file", "channels": [0], "source": "target.wav"}]
    target = {"id": "t", "duration": 2.0, "sampling_rate": RATE, "sources": sources}
    talk = [said(0.0, 0.5, "one?", "user"), said(0.5, 0.5, "two", "agent", 1)]
    talk += [said(1.0, 0.4, "three?", "user"), said(1.5, 0.5, "four", "agent", 1)]
    duplex = cut(tmp_path, supervisions=talk, custom={"target_audio": target})
    stereo = cut(tmp_path, supervisions=talk, channel=[0, 1], type="MultiCut")
    whole = cut(tmp_path, custom={"target_audio": target})
    first, second, third = rows(write_lines(tmp_path / "cuts.jsonl", [duplex, stereo, whole]))
    for row, other, offset in ((first, noise(2.0, 2), 0.0), (second, noise(4.0, 1), 1.0)):
        assert [(t.question_text, t.answer_text) for t in row.turns] == [("one?", "two"), ("three?", "four")]
        for index, turn in enumerate(row.turns):
            begin, end = round((1.0 + index) * RATE), round((1.5 + 0.9 * index) * RATE)
            np.testing.assert_allclose(turn.question_audio.load(RATE).numpy(), noise(4.0, 0)[begin:end], atol=2 / 32768)
            begin = round((offset + 0.5 + index) * RATE)
            np.testing.assert_allclose(turn.answer_audio.load(RATE).numpy(), other[begin : begin + RATE // 2], atol=2 / 32768)
    assert [t.question_text for t in third.turns] == ["hi"] and third.turns[0].answer_audio.path == "target.wav"


def test_common_voice(tmp_path):
    path = common_voice(tmp_path)
    for file in (path, tmp_path):
        found = rows(file)
        assert [(r.id, r.speaker, r.language, r.turns[0].question_text) for r in found] == [
            (str(i), "ann", "fr", f'Say "{i}') for i in range(3)
        ]
        for index, row in enumerate(found):
            heard(row.turns[0].question_audio, 0.2, 300 + index)
    shutil.copy(path, tmp_path / "dev.tsv")
    with pytest.raises(UserError, match=r"holds several tables, which share rows: name one of dev\.tsv, train\.tsv"):
        open_source(tmp_path)


def test_recordings_without_texts(tmp_path):
    found = rows(recordings(tmp_path / "d"))
    assert [r.id for r in found] == ["a/c.flac", "a/d/e.ogg", "a/f.WAV", "b.wav"]
    for row, hertz in zip(found, (301, 302, 303, 300), strict=True):
        (turn,) = row.turns
        assert turn.question_text == turn.answer_text == "" and turn.question_audio is not None
        if not row.id.endswith(".ogg"):
            heard(turn.question_audio, 0.2, hertz)
    (tmp_path / "d/a/broken.wav").write_text("no sound")
    assert [isinstance(item, Broken) for item in open_source(tmp_path / "d")] == [True, False, False, False, False]
    (tmp_path / "d/index.csv").write_text("what,else\n")  # may say more than the sound
    with pytest.raises(UserError, match=r"--read.format, one of .*recordings"):
        recognise(tmp_path / "d")
    assert len(open_source(tmp_path / "d", ReaderOptions(format="recordings"))) == 5
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no recording"):
        open_source(tmp_path / "empty", ReaderOptions(format="recordings"))


def test_librispeech(tmp_path):
    found = rows(librispeech(tmp_path))
    stems = ["1272-1", "84-121123", "84-121550"]
    assert [r.id for r in found] == [f"{stem}-{i:04}" for stem in stems for i in range(2)]
    assert [r.speaker for r in found] == ["1272", "1272", "84", "84", "84", "84"]
    for index, row in enumerate(found):
        assert row.turns[0].question_text == f"SENTENCE {index % 2}"
        heard(row.turns[0].question_audio, 0.2, 300 + index % 2)


NAMES = ["a", "a.flac", "a b", "a-b", ".hidden", "é", "\U0001f600", "ꬰ", "b\udcff", "b\udcfe", "A", "a\nb", "a\x01"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Files, folders and links with names whose order is easily mistaken."""
    root = tmp_path / "tree"
    for outer in ("", *NAMES[::2]):
        for number, name in enumerate(NAMES):
            place = root / outer / name
            if outer == name or (not outer and name in NAMES[::2]):
                continue
            for file in (place / "x", place / "x.flac") if number % 3 == 0 and outer else (place,):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(b"x" * number)
    (root / "to-folder").symlink_to(tmp_path)
    (root / "to-file").symlink_to(__file__)
    (root / "to-nothing").symlink_to("nowhere")
    return root


def test_the_order_is_that_of_a_plain_sort(tree: Path) -> None:
    every = [file for file in sorted(tree.rglob("*")) if not file.is_dir() and file.relative_to(tree).parts[0] != "to-folder"]
    shown = [file for file in every if not any(part.startswith(".") for part in file.relative_to(tree).parts)]
    assert len(shown) > 20 and any("b\udcff" in str(file) for file in shown)
    assert [Path(file) for file in list_files(tree)] == shown
    assert [Path(file) for file in list_files(tree, (".flac",))] == [file for file in shown if file.suffix == ".flac"]
    assert [Path(file) for file in list_files(tree, depth=0)] == [file for file in shown if file.parent == tree]
    assert list(list_files(tree / "nowhere")) == []


def test_a_folder_of_recordings_is_recognised_by_all_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "a" / ".git").mkdir(parents=True)
    for name in ("a/b.wav", "a/.git/notes", ".hidden.txt", "c.FLAC"):
        (tmp_path / name).write_bytes(b"sound")
    source = open_source(tmp_path, ReaderOptions())
    assert source.format == "recordings" and len(source) == 2
    assert [item.where for item in source] == [str(tmp_path / "a/b.wav"), str(tmp_path / "c.FLAC")]
    (tmp_path / "notes.txt").write_text("more")
    with pytest.raises(UserError, match="of no format known here"):
        open_source(tmp_path, ReaderOptions())
