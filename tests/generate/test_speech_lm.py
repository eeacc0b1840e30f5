"""The Python door: whole answers, streams and batches agree, and mistakes are named."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import omni
from omni import tasks
from omni.audio.io import audio_info, read_audio
from omni.checkpoint.folder import save_folder
from omni.codec.registry import CODECS, CodecSpec
from omni.cpu.int8 import Int8Linear
from omni.engine.answer import Running
from omni.errors import UserError
from omni.generate.options import GREEDY, AnswerOptions, OptionValues
from omni.generate.results import AudioChunk, Ended, TextDelta
from omni.generate.sampling import Sampling
from omni.generate.speech_lm import SpeechLM
from omni.layout import Layout
from omni.tasks import Turn, example, join, prompt
from omni.text import Tokenizer
from tests.generate.conftest import LAYOUTS, EchoCodec, make_lm, make_model, tone
from tests.generate.session_toys import equal, same

QUESTIONS: list[Any] = [tone(0.3), "hello you", tone(0.5, 500.0), "and you over there, who are you?", "x", tone(0.2)]
TASKS = ["A1A2", "T1A2", "A1T2", "T1A1", "T1T2", "A1T1"]
SETTINGS = [GREEDY, Sampling(1.0), {"audio": Sampling(1.0, top_k=4, repetition_penalty=1.2), "text": Sampling(1.0, top_p=0.9)}]


def echo(layout: Layout) -> CodecSpec:
    """A codec whose weights are a folder with anything in it."""
    sizes = layout.codebook_sizes
    made = EchoCodec(sizes)
    return CodecSpec("echo", lambda folder, device: EchoCodec(sizes), made.sample_rate, made.frame_rate, sizes, "anything")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sampling", SETTINGS, ids=["greedy", "hot", "each"])
@pytest.mark.parametrize("shape", [{}, {"window": 9, "post_layers": 1}], ids=["full", "window"])
def test_a_batch_equals_its_rows(layout: Layout, sampling: Any, shape: dict[str, Any]) -> None:
    lm = make_lm(layout, **shape)
    seeds = [5, 5, 7, 8, 9, -1]
    limits: dict[str, Any] = {"sampling": sampling, "max_seconds": 0.6, "max_tokens": 12}
    alone = [lm.generate(q, t, seed=s, **limits) for q, t, s in zip(QUESTIONS, TASKS, seeds, strict=True)]
    for batch_size in (6, 4):
        together = lm.generate(QUESTIONS, TASKS, seed=seeds, batch_size=batch_size, **limits)
        for mine, theirs in zip(together, alone, strict=True):
            same(mine, theirs)
            assert mine.sample_rate == theirs.sample_rate
            assert mine.audio is theirs.audio or torch.equal(mine.audio, theirs.audio)
    if sampling is not GREEDY:
        again = lm.generate(QUESTIONS[1], TASKS[1], seed=6, **limits)
        assert again.tokens != alone[1].tokens  # a seed matters


TALKER = {"post_layers": 2, "talker": True, "combine": "sum"}


def test_above_a_talker_the_same_is_written_whether_it_is_spoken_or_not() -> None:
    """What follows in a conversation is that of the written one; and training computes what is sampled, step for step."""
    lm = make_lm(LAYOUTS["pad"], **TALKER)
    layout = lm.layout
    limits: dict[str, Any] = {"max_seconds": 0.6, "max_tokens": 12, "sampling": GREEDY}
    for question, spoken, written in (("hello you", "T1A2", "T1T2"), (tone(0.3), "A1A2", "A1T2")):
        found, wanted = (lm.generate(question, task, **limits) for task in (spoken, written))
        assert found.tokens[:12] == wanted.tokens[:12] != ()
    session = lm.session(**limits)
    session.ask("hello you", "T1A2").answer()
    asked = Turn("T1T2", question=tuple(lm.tokenizer.encode("and then?")))
    told = [prompt(layout, turn) if i else tasks.answer(layout, turn) for turn in session.turns for i in (1, 0)]
    with torch.no_grad():
        hidden = lm.model(join([*told, prompt(layout, asked)]).tokens[None])
    best = lm.model.decoder.text_logits(hidden)[0, -1, : layout.text.size].argmax()
    assert session.ask("and then?", "T1T2").answer().tokens[0] == best
    first = lm.generate("hello you", "T1A2", **limits)
    turn = Turn("T1A2", question=tuple(lm.tokenizer.encode("hello you")), text=first.tokens, codes=first.codes, cut=True)
    columns = example(layout, [turn])
    with torch.no_grad():
        hidden = lm.model(columns.tokens[None])
        logits = lm.model.decoder.logits(hidden)
    for stream, scores in enumerate(logits):
        scores[..., lm.layout.streams[stream].size :] = float("-inf")
        goal = columns.targets[stream]
        at = (goal >= 0) & (goal < lm.layout.streams[stream].size)
        assert at.sum() >= 8 and scores[0, at].argmax(-1).equal(goal[at])


@pytest.mark.sampled(1)
def test_system_messages_are_of_their_own_rows(layout: Layout) -> None:
    lm = make_lm(layout)
    limits: dict[str, Any] = {"max_seconds": 0.6, "max_tokens": 12}
    systems = ["be brief", "", "  ", "be kind", "be brief", "answer in French, and at length"]
    alone = [lm.generate(q, t, system=s, **limits) for q, t, s in zip(QUESTIONS, TASKS, systems, strict=True)]
    together = lm.generate(QUESTIONS, TASKS, system=systems, **limits)
    for mine, theirs in zip(together, alone, strict=True):
        same(mine, theirs)
    plain = lm.generate(QUESTIONS, TASKS, **limits)
    alike = [equal(a, b) for a, b in zip(plain, alone, strict=True)]
    assert alike[1] and alike[2] and not all(alike)  # an empty message is none, another one matters


@pytest.mark.sampled(1)
def test_streamed_equals_whole_and_sound_equals_the_codec_s(lm: SpeechLM) -> None:
    codec = lm.codec
    assert codec is not None
    for question, task in zip(QUESTIONS, TASKS, strict=True):
        limits: dict[str, Any] = {"sampling": Sampling(1.0, top_k=4), "seed": 3, "max_seconds": 0.8, "max_tokens": 9}
        answer = lm.generate(question, task, **limits)
        events = list(lm.stream(question, task, **limits))
        last = events.pop()
        assert isinstance(last, Ended) and last.reason == answer.ended
        sound = [e.samples for e in events if isinstance(e, AudioChunk)]
        assert "".join(e.text for e in events if isinstance(e, TextDelta)) == answer.text
        assert answer.text == lm.tokenizer.decode(answer.tokens)
        if answer.codes is None:
            assert not sound and answer.audio is None
            continue
        assert answer.audio is not None and torch.equal(torch.cat([torch.zeros(0), *sound]), answer.audio)
        if answer.codes.shape[1]:
            assert torch.equal(answer.audio, codec.decode(answer.codes))
        assert len(answer.audio) == answer.codes.shape[1] * codec.frame_samples


def test_sound_comes_with_the_first_frame_that_can_be_exact(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = make_lm(layout)
    put, came = Running.put, []

    def watched(running: Running, event: Any) -> None:
        if isinstance(event, AudioChunk):
            came.append((running.processed, len(event.samples)))
        put(running, event)

    monkeypatch.setattr(Running, "put", watched)
    lm.generate("hello", "T1A1", sampling=Sampling(1.0, top_k=2), max_seconds=0.8)
    assert lm.codec is not None and came[0] == (layout.max_delay + 1 + lm.codec.lookahead, lm.codec.frame_samples)


def test_timings(lm: SpeechLM) -> None:
    answer = lm.generate(tone(0.3), "A1A2", max_seconds=0.4, sampling=Sampling(1.0, top_k=2), seed=2)
    t = answer.timings
    assert answer.audio is not None and t.first_text is not None and t.first_audio is not None
    assert 0 < t.encode < t.prefill < t.first_text <= t.first_audio < t.total
    assert t.audio == len(answer.audio) / 100 and t.real_time_factor == pytest.approx(t.total / t.audio)
    assert t.steps == 10 + lm.layout.max_delay + (answer.ended == "end") or answer.ended != "end"


def test_timings_wait_for_the_device(lm: SpeechLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that does its work only while it is waited for, five seconds each time; the host takes no time."""
    now = [0.0]

    def wait(device: torch.device) -> None:
        assert device == lm.model.device
        now[0] += 5.0

    monkeypatch.setattr("omni.generate.results.time.perf_counter", lambda: now[0])

    monkeypatch.setattr("omni.engine.intake.is_finite", lambda features: True)
    monkeypatch.setattr("omni.engine.intake.finish_queued", wait)
    for answer in (lm.generate(tone(0.3), max_seconds=0.3), *lm.generate([tone(0.3)], max_seconds=0.3)):
        assert (answer.timings.encode, answer.timings.prefill) == (5.0, 10.0)


def test_a_question_that_is_too_long_is_named_before_any_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = make_lm(LAYOUTS["pad"])
    monkeypatch.setattr("omni.engine.engine.Engine.ask", lambda *_: pytest.fail("a question was answered"))
    with pytest.raises(UserError, match="question 2 of 3 takes 604 positions, but the model's context has 512"):
        lm.generate(["a", "x" * 601, "b"], "T1T2", batch_size=1)


def test_options_of_a_session_are_those_of_a_single_question(lm: SpeechLM) -> None:
    assert set(OptionValues.__annotations__) == {f.name for f in dataclasses.fields(AnswerOptions)}
    answer = lm.generate("hello", "T1A2", context=16, max_seconds=2.0)
    assert answer.ended == "cache"
    last = list(lm.stream("hello", "T1A2", context=16, max_seconds=2.0, overflow="forget"))[-1]
    assert isinstance(last, Ended) and last.reason == "cache" and last.timings.steps == answer.timings.steps


def test_an_empty_batch_and_no_codec(layout: Layout) -> None:
    lm = make_lm(layout)
    assert lm.generate([]) == []
    silent = SpeechLM(lm.model, lm.tokenizer)
    answer = silent.generate("hello", "T1A2", max_tokens=8)
    assert answer.audio is None and answer.sample_rate == 0 and answer.codes is not None
    assert torch.equal(answer.codes, lm.generate("hello", "T1A2", max_seconds=8 / 25).codes)
    quiet = lm.generate(["hello"], "T1A2", sound=False, max_seconds=0.3)
    assert quiet[0].audio is None and quiet[0].codes is not None


def test_a_saved_folder_answers_as_the_model_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LAYOUTS["pad"]
    model = make_model(layout)
    monkeypatch.setitem(CODECS, "echo", None)  # and away again after the test
    CODECS.add("echo", echo(layout))
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "none.txt").write_text("an echo needs no weights")
    config = dataclasses.replace(model.config, codec="echo")
    save_folder(tmp_path / "m", config, model.state_dict(), Tokenizer.bytes(), codec_folder=tmp_path / "weights")
    lm = omni.SpeechLM.from_pretrained(tmp_path / "m")
    save_folder(tmp_path / "bare", config, model.state_dict(), Tokenizer.bytes())
    assert SpeechLM.from_pretrained(tmp_path / "bare").codec is None
    assert isinstance(SpeechLM.from_pretrained(tmp_path / "bare", codec_folder=tmp_path / "weights").codec, EchoCodec)
    mine = SpeechLM(model, Tokenizer.bytes(), EchoCodec(layout.codebook_sizes)).generate(tone(0.3), max_seconds=0.4)
    theirs = lm.generate(tone(0.3), max_seconds=0.4)
    assert theirs.tokens == mine.tokens and torch.equal(theirs.codes, mine.codes)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="does not exist"):
        SpeechLM.from_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize("suffix", [".wav", ".flac", ".ogg", ".WAV"])
def test_an_answer_can_be_saved(suffix: str, tmp_path: Path) -> None:
    place = tmp_path / f"a{suffix}"
    sound = 0.5 * torch.sin(torch.arange(8000) / 20)
    answer = dataclasses.replace(make_lm(LAYOUTS["pad"]).generate("hi", "T1T2", max_tokens=2), audio=sound, sample_rate=8000)
    assert answer.save(str(place)) == place
    info = audio_info(place)
    assert (info.sample_rate, info.samples, info.channels) == (8000, 8000, 1) and list(tmp_path.iterdir()) == [place]
    assert info.format.split()[0] == suffix[1:].upper()
    if suffix != ".ogg":
        assert torch.equal(read_audio(place, 8000), (sound * 32768).round() / 32768)
    else:
        assert (read_audio(place, 8000) - sound).abs().mean() < 0.02


@pytest.fixture
def silent_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder without a codec."""
    model = make_model(LAYOUTS["pad"])
    monkeypatch.setitem(CODECS, "echo", None)  # and away again after the test
    CODECS.add("echo", echo(LAYOUTS["pad"]))
    save_folder(tmp_path / "m", dataclasses.replace(model.config, codec="echo"), model.state_dict(), Tokenizer.bytes())
    return tmp_path / "m"


def test_number_formats_and_devices_have_names(silent_folder: Path) -> None:
    names: list[Any] = ["bfloat16", "bf16", "torch.bfloat16", torch.bfloat16, "float16", "auto", None]
    found = [SpeechLM.from_pretrained(silent_folder, dtype=name).model.decoder.norm.weight.dtype for name in names]
    assert found == [torch.bfloat16] * 4 + [torch.float16] + [torch.float32] * 2
    assert SpeechLM.from_pretrained(silent_folder, torch.device("cpu"), "fp32").model.device.type == "cpu"
    small = SpeechLM.from_pretrained(silent_folder, quantize="int8").model
    assert all(isinstance(part, Int8Linear) for part in small.modules() if isinstance(part, torch.nn.Linear))


def test_what_the_library_does_is_logged_and_not_printed(
    silent_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("omni")
    monkeypatch.setattr(handler, "emit", lambda record: lines.append(record.getMessage()))
    logger.addHandler(handler)
    logger.setLevel("DEBUG")
    try:
        with SpeechLM.from_pretrained(silent_folder).session() as session:
            session.ask("hi", "T1T2", seed=1).answer()
    finally:
        logger.removeHandler(handler)
        logger.setLevel("NOTSET")
    assert any(str(silent_folder) in line and " s: SpeechLM(" in line for line in lines)
    assert any("a session of 512 positions starts" in line for line in lines)
    assert capfd.readouterr() == ("", "")
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("omni").handlers)
