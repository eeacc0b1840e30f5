"""A conversation as messages: read, given to another session, saved and gone on with."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from omni import Message
from omni.audio.wav import write_wav
from omni.errors import SoundWarning, UserError
from omni.generate.session import Session
from omni.generate.speech_lm import SpeechLM
from tests.generate.conftest import LAYOUTS, make_lm, tone
from tests.generate.session_toys import ASKED, TALKATIVE

TALK: dict[str, Any] = {"sampling": TALKATIVE, "seed": 4, "max_seconds": 0.4, "max_tokens": 9}


def talk(session: Session, turns: int = 3) -> None:
    """Turns of several kinds, the last interrupted."""
    for turn in range(turns):
        session.ask(*ASKED[turn]).answer()
    session.cancel(played_seconds=0.2, shown_characters=3)


def test_a_history_can_be_read(lm: SpeechLM) -> None:
    with lm.session(**TALK) as session:
        answer = session.ask(tone(0.3)).answer()
        written = session.ask("and then?", "T1T2").answer()
        spoken = session.ask("say", "T1A1").answer()
        said = [(m.role, m.text, m.seconds) for m in session.history]
    assert answer.audio is not None and spoken.audio is not None
    assert said == [
        ("user", None, 0.3),
        ("assistant", answer.text, len(answer.audio) / 100),
        ("user", "and then?", 0.0),
        ("assistant", written.text, 0.0),
        ("user", "say", 0.0),
        ("assistant", None, len(spoken.audio) / 100),
    ]
    assert session.history[1] == Message("assistant", answer.text, len(answer.audio) / 100)
    assert repr(session.history[0]) == "Message(role='user', seconds=0.3)"
    assert len(repr(Message("assistant", "\0" * 500))) <= 120


@pytest.mark.sampled(1)
def test_a_restored_conversation_goes_on_as_the_unbroken_one(chatty: SpeechLM, tmp_path: Path) -> None:
    with chatty.session(**TALK) as session:
        talk(session)
        histories = [session.history, session.save(tmp_path / "talk.safetensors"), str(session.save(tmp_path / "talk"))]
        kept = session.turns
        following = [session.ask(*ASKED[turn]).answer() for turn in (3, 4)]
    assert torch.is_tensor(following[1].codes) and following[1].tokens
    for history in histories:
        with chatty.session(history=history, **TALK) as session:
            assert [(t.text, t.cut) for t in session.turns] == [(t.text, t.cut) for t in kept]
            assert all(a.codes is b.codes or torch.equal(a.codes, b.codes) for a, b in zip(session.turns, kept, strict=True))
            for turn, wanted in zip((3, 4), following, strict=True):
                answer = session.ask(*ASKED[turn]).answer()
                assert answer.tokens == wanted.tokens
                assert answer.codes is wanted.codes or torch.equal(answer.codes, wanted.codes)


def test_draws_go_on_where_turns_were_forgotten(tmp_path: Path) -> None:
    lm = make_lm(LAYOUTS["pad"])
    options = {**TALK, "context": 64, "overflow": "forget"}
    with lm.session(**options) as session:
        for turn in (0, 1, 2, 3, 0):
            session.ask(*ASKED[turn]).answer()
        session.save(tmp_path / "talk")
        assert len(session.turns) < 5
        wanted = session.ask(*ASKED[4]).answer()
    with lm.session(history=tmp_path / "talk", **options) as session:
        assert session.ask(*ASKED[4]).answer().tokens == wanted.tokens


def test_messages_of_chat_templates(lm: SpeechLM, tmp_path: Path) -> None:
    assert lm.codec is not None
    sound = torch.rand(40)
    soundfile.write(tmp_path / "a.wav", sound.numpy(), 100, subtype="FLOAT")
    history = [
        {"role": "user", "content": "how are you?"},
        {"role": "assistant", "content": "well"},
        {"role": "user", "content": tone(0.3)},
        {"role": "assistant", "content": [{"type": "text", "text": "zero"}, {"type": "audio", "audio": tmp_path / "a.wav"}]},
        {"role": "user", "content": [{"type": "text", "text": "say it"}]},
        {"role": "assistant", "content": (100, sound)},
        Message("user", "and?", tokens=(1, 2)),  # ids of another tokenizer
        Message("assistant", "fine", codes=torch.zeros(lm.layout.n_audio, 3)),
    ]
    with lm.session(history=history, **TALK) as session:
        assert [(t.task if isinstance(t.task, str) else t.task.name) for t in session.turns] == ["T1T2", "A1A2", "T1A1", "T1A2"]
        codes = lm.codec.encode(sound)
        assert list(session.turns[3].question) == lm.tokenizer.encode("and?")
        assert torch.equal(session.turns[1].codes, codes) and torch.equal(session.turns[2].codes, codes)  # type: ignore[arg-type]
        said = [(m.role, m.text, m.seconds) for m in session.history]
        assert said[:4] == [
            ("user", "how are you?", 0.0), ("assistant", "well", 0.0), ("user", None, 0.3), ("assistant", "zero", 0.4)
        ]  # fmt: skip
        wanted = session.ask("next", "T1T2").answer().tokens
    with lm.session(**TALK) as session:  # a spoken question matters
        assert session.ask("next", "T1T2").answer().tokens != wanted


def test_a_text_is_no_path_whatever_its_answer_says(lm: SpeechLM, tmp_path: Path) -> None:
    place = str(write_wav(tmp_path / "a.wav", tone(0.3), 16_000) or tmp_path / "a.wav")
    reply = Message("assistant", "yes", codes=torch.zeros(lm.layout.n_audio, 2, dtype=torch.long), task="A1A2")
    with pytest.warns(SoundWarning), lm.session(history=[{"role": "user", "content": place}, reply]) as session:
        assert session.history[0].text == place and session.history[0].audio is None


def test_sound_is_kept_as_it_was_asked(lm: SpeechLM) -> None:
    buffer = tone(0.3)
    with lm.session(**TALK) as session:
        session.ask(buffer).answer()
        buffer.zero_()
        audio = session.history[0].audio
        assert audio is not None and torch.equal(audio, tone(0.3))


USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
BAD: dict[str, tuple[Any, str]] = {
    "order": ([ASSISTANT, USER], "message 1 is of role 'assistant'.*'user' comes there"),
    "role": ([{"role": "bot", "content": "x"}], "message 1 is of role 'bot'"),
    "system": ([{"role": "system", "content": "be brief"}, USER, ASSISTANT], "message 1 is of role 'system'.*system="),
    "no answer": ([USER, ASSISTANT, USER], "last message is a question without its answer"),
    "empty": ([{"role": "user", "content": ""}, ASSISTANT], "message 1: .*text is empty"),
    "image": ([{"role": "user", "content": [{"type": "image", "image": "x.png"}]}, ASSISTANT], "part of type 'image'"),
    "codes": ([USER, Message("assistant", "x", codes=torch.full((4, 2), 99))], "message 1: code 99 of audio stream 0"),
    "too loud": ([USER, {"role": "assistant", "content": torch.full((9,), 3e4)}], "message 2: the answer has a sample of 3e"),
    "too long": ([USER, {"role": "assistant", "content": "x" * 600}], "history takes 606 positions.*overflow='forget'"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_history_is_refused(name: str) -> None:
    lm = make_lm(LAYOUTS["pad"])
    history, line = BAD[name]
    with pytest.raises(UserError, match=line):
        lm.session(history=history)
    assert lm.generate("hi", "T1T2", max_tokens=2).text is not None
    silent = SpeechLM(lm.model, lm.tokenizer)
    with pytest.raises(UserError, match=r"message 2\b.*no codec"):
        silent.session(history=[USER, {"role": "assistant", "content": torch.rand(50)}])


def altered(change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        with safe_open(path, "pt") as file:
            head = json.loads(file.metadata()["conversation"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        change(head, tensors)
        save_file(tensors, path, {"conversation": json.dumps(head)})

    return spoil


SPOILT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda p: p.unlink(), "is no file; give the file"),
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[:-9]), "no saved conversation, or damaged"),
    "version": (altered(lambda h, t: h.update(format=2)), "format 2 is unknown; this version reads format 1"),
    "codec": (altered(lambda h, t: h.update(codec="mimi")), "codec 'mimi', and this model's codec is"),
    "layout": (altered(lambda h, t: h["layout"].update(fill="sampled")), "another layout"),
    "task": (altered(lambda h, t: h["turns"][0].update(task="X")), "does not fit together"),
    "codes": (altered(lambda h, t: t["turn.0.codes"].fill_(9999)), "code 9999 of audio stream 0"),
    "sound": (altered(lambda h, t: t["turn.0.audio"].fill_(float("nan"))), "not finite"),
    "no sound": (altered(lambda h, t: t.pop("turn.0.audio")), "turn 1: the sound of its question is missing"),
    "ids": (altered(lambda h, t: t["turn.1.question"].add_(1)), "turn 2: its ids are another tokenizer's"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("talks") / "talk"
    with make_lm(LAYOUTS["pad"]).session(**TALK) as session:
        talk(session)
        return session.save(place)


@pytest.mark.parametrize("name", SPOILT)
def test_a_bad_file_is_refused(name: str, saved: Path, tmp_path: Path) -> None:
    spoil, line = SPOILT[name]
    path = tmp_path / "talk"
    path.write_bytes(saved.read_bytes())
    spoil(path)
    with pytest.raises(UserError, match=line) as caught:
        make_lm(LAYOUTS["pad"]).session(history=path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_another_model_s_conversation_is_refused(saved: Path) -> None:
    with pytest.raises(UserError, match="another layout"):
        make_lm(LAYOUTS["sampled"]).session(history=saved)
    lm = make_lm(LAYOUTS["pad"], seed=7)  # other weights of the same layout go on with it
    with lm.session(history=saved, **TALK) as session:
        assert len(session.turns) == 3 and session.ask("more", "T1T2").answer().tokens


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    lm: SpeechLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lm.session(**TALK) as session:
        session.ask("hi", "T1T2").answer()
        place = session.save(tmp_path / "talk")
        before = place.read_bytes()
        with pytest.raises(UserError, match="No such file or directory"):
            session.save(tmp_path / "no" / "talk")

        def full(number: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        session.ask("more", "T1T2").answer()
        with pytest.raises(UserError, match="No space left on device"):
            session.save(place)
    assert place.read_bytes() == before and list(tmp_path.iterdir()) == [place]


def test_an_answer_under_way_is_not_saved(lm: SpeechLM, tmp_path: Path) -> None:
    with lm.session(**TALK) as session:
        session.ask("hi", "T1T2").answer()
        events = session.ask("more", "T1A2")
        next(events)
        session.save(tmp_path / "talk")
    with lm.session(history=tmp_path / "talk", **TALK) as session:
        assert [message.text for message in session.history][:1] == ["hi"] and len(session.history) == 2
