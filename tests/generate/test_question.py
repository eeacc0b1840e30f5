"""A question is the same whatever Python holds it in; what cannot be one is refused before memory is taken."""

from __future__ import annotations

import dataclasses
import io
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from omni.audio.resample import resample
from omni.config import ProjectorConfig
from omni.convert.huggingface import pad_rows
from omni.encoder.whisper_config import WhisperConfig
from omni.errors import SoundWarning, UserError
from omni.generate.listening import FeatureStream
from omni.generate.question import encode_questions, longest, read_question
from omni.generate.speech_lm import SpeechLM
from omni.layout import ChatFormat
from omni.model.projector import TokenHead
from omni.model.speech_model import SpeechModel
from omni.text import Tokenizer
from tests.close import assert_near
from tests.generate.conftest import LAYOUTS, make_lm, make_model, tone

TONE = (0.5 * np.sin(2 * np.pi * 440 * np.arange(4800) / 16000)).astype(np.float32)
LEVELS = np.round(TONE * 32768).astype(np.int16)
"""The same as 16 bits."""


@pytest.fixture(scope="module")
def model() -> SpeechModel:
    return make_model(LAYOUTS["pad"])


def heard(model: SpeechModel, question: Any, sample_rate: Any = 16000) -> torch.Tensor:
    clip = read_question(question, "A1A2", model.config, Tokenizer.bytes(), sample_rate).clip
    assert clip is not None and clip.dtype == torch.float32 and clip.ndim == 1
    return clip


def wav(folder: Path) -> Path:
    soundfile.write(folder / "q.wav", TONE, 16000, subtype="FLOAT")
    return folder / "q.wav"


FORMS: dict[str, Any] = {
    "tensor": torch.from_numpy(TONE),
    "row": torch.from_numpy(TONE)[None],
    "with a gradient": torch.from_numpy(TONE).requires_grad_(),
    "double": TONE.astype(np.float64),
    "column": TONE[:, None],
    "every second of a larger one": np.repeat(TONE, 2)[::2],
    "list": TONE.tolist(),
    "pair of a user interface": (16000, TONE),
    "pair of a file": (TONE, 16000),
    "numpy's rate": (np.int64(16000), TONE),
    "data set": {"array": TONE, "sampling_rate": 16000, "path": None},
    "row of a data set": {"audio": {"array": TONE, "sampling_rate": 16000}},
    "left and right": np.stack([2 * TONE, 0 * TONE]),
    "right and left": np.stack([0 * TONE, 2 * TONE], axis=1),
}


@pytest.mark.parametrize("form", FORMS)
def test_whatever_holds_the_samples(form: str, model: SpeechModel) -> None:
    assert torch.equal(heard(model, FORMS[form]), torch.from_numpy(TONE))


@pytest.mark.parametrize("form", ["path", "text", "bytes", "view", "file", "bytes of a row", "path of a row"])
def test_whatever_holds_the_file(form: str, model: SpeechModel, tmp_path: Path) -> None:
    path = wav(tmp_path)
    data = path.read_bytes()
    question: Any = {
        "path": path,
        "text": str(path),
        "bytes": data,
        "view": memoryview(data),
        "file": io.BytesIO(data),
        "bytes of a row": {"audio": {"bytes": data, "path": "elsewhere.wav"}},
        "path of a row": {"bytes": None, "path": str(path)},
    }[form]
    assert torch.equal(heard(model, question, 8000), torch.from_numpy(TONE))  # the file knows its rate


@pytest.mark.parametrize(
    ("samples", "error"),
    [
        (LEVELS, 1 / 65536),
        (torch.from_numpy(LEVELS), 1 / 65536),
        (LEVELS.astype(np.int32) * 65536, 1 / 65536),
        (LEVELS.tolist(), 1 / 65536),
        ((LEVELS // 256 + 128).astype(np.uint8), 1 / 128),
        ((LEVELS // 256).astype(np.int8), 1 / 128),
        (torch.from_numpy(TONE).bfloat16(), 1 / 256),
        (TONE.astype(np.float16), 1 / 2048),
    ],
    ids=["int16", "int16 tensor", "int32", "list", "uint8", "int8", "bfloat16", "float16"],
)
def test_integers_are_scaled_by_their_type(samples: Any, error: float, model: SpeechModel) -> None:
    assert (heard(model, samples) - torch.from_numpy(TONE)).abs().max() <= error + 1e-7


@pytest.mark.parametrize("rate", [8000, 11127, 22050, 44100, 44101, 48000, 96000.0, np.int32(24000)])
def test_any_rate(rate: Any, model: SpeechModel) -> None:
    samples = (0.5 * np.sin(2 * np.pi * 440 * np.arange(int(rate * 0.3)) / float(rate))).astype(np.float32)
    for question, given in ((samples, rate), ((rate, samples), 16000)):
        clip = heard(model, question, given)
        assert torch.equal(clip, resample(torch.from_numpy(samples), int(rate), 16000))
        assert (clip - torch.from_numpy(TONE)[: len(clip)])[800:-800].abs().max() < 5e-3


def test_the_python_door_takes_them(model: SpeechModel) -> None:
    lm = make_lm(LAYOUTS["pad"])
    wanted = lm.generate(torch.from_numpy(LEVELS / np.float32(32768)), max_seconds=0.4)
    assert lm.generate((16000, LEVELS), max_seconds=0.4).tokens == wanted.tokens
    assert lm.generate([LEVELS, {"array": LEVELS, "sampling_rate": 16000}], max_seconds=0.4)[1].tokens == wanted.tokens
    with lm.session(max_seconds=0.4) as session:
        assert session.ask(LEVELS.tolist()).answer().tokens == wanted.tokens


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "nothing": ([], 16000, "no samples"),
    "lists of unequal lengths": ([[1.0, 2.0], [3.0]], 16000, "no array of numbers"),
    "two by two": (np.ones((2, 2), np.float32), 16000, r"shape \[2, 2\]"),
    "eight channels": (np.zeros((8, 900), np.float32), 16000, "8 channels"),
    "wide": ([1 << 40, 0], 16000, "1099511627776.*int64"),
    "negative": ((-1, TONE), 16000, "-1 Hz"),
    "array alone": ({"array": TONE}, 16000, "sampling_rate"),
    "one hertz": (TONE, 1, "4800 s at 1 Hz"),
    "a long way": (np.zeros(31 * 16000, np.float32), 16000, "lasts 31 s"),
    "not finite": ([0.0, float("nan")], 16000, "not finite"),
    "words": ("what is the time?", 16000, "no sound file 'what is the time.*T1A2"),
    "a zero byte": ("a\0.wav", 16000, "no file can have this name"),
    "text": (b"what is the time?", 16000, "but text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_question(name: str, model: SpeechModel) -> None:
    question, rate, said = REFUSED[name]
    with pytest.raises(UserError, match=said) as caught:
        heard(model, question, rate)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_file_is_not_at_its_end(model: SpeechModel, tmp_path: Path) -> None:
    path = wav(tmp_path)
    with path.open("rb") as file:
        file.read()
        with pytest.raises(UserError, match=r"q.wav'.*seek\(0\)"):
            heard(model, file)
        file.seek(0)
        assert torch.equal(heard(model, file), torch.from_numpy(TONE))


def test_a_text_that_names_a_sound_is_told(model: SpeechModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sound").write_bytes(b"")
    for text in ("q.wav", "sound"):
        with pytest.warns(SoundWarning, match=rf"'{text}'.*T1T2.*task='A1T2'"):
            read_question(text, "T1T2", model.config, Tokenizer.bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_question("what is in q.wav", "T1T2", model.config, Tokenizer.bytes())


def test_the_longest_question(model: SpeechModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = model.config
    assert longest(config) == 30
    encoder = dataclasses.replace(config.encoder, long_audio="split")
    assert longest(dataclasses.replace(config, encoder=encoder)) == 512 * 2 / 50
    path = tmp_path / "long.wav"
    soundfile.write(path, np.zeros(31 * 16000, np.int16), 16000)
    monkeypatch.setattr(soundfile.SoundFile, "read", lambda *_, **__: pytest.fail("decoded before it was refused"))
    with pytest.raises(UserError, match=r"31\.0 s or more, and the limit is 30 s"):
        heard(model, path)


SPOKEN = ("A1T1", "A1A2", "A1T2")


def shared_model() -> SpeechModel:
    plain = make_model(next(iter(LAYOUTS.values())))
    torch.manual_seed(1)
    model = SpeechModel(replace(plain.config, projector=ProjectorConfig("cgc", stack=2))).eval()
    model.decoder.load_state_dict(plain.decoder.state_dict())
    return model


def test_the_task_of_a_question_chooses_its_parts() -> None:
    """Together as alone, and otherwise for another task; the projector's own parts are what training gives the clip."""
    model, tokenizer = shared_model(), Tokenizer.bytes()
    asked = [read_question(tone(0.4 + 0.1 * i), task, model.config, tokenizer) for i, task in enumerate(SPOKEN)]
    together = encode_questions(model, asked)
    for task, one, found in zip(SPOKEN, asked, together, strict=True):
        (alone,) = encode_questions(model, [one])
        assert one.clip is not None and found is not None and alone is not None
        assert_near(found, alone, 1e-5)
        mel = model.encoder.config.features(one.clip)
        with torch.no_grad():
            frames = [model.encoder.config.frames(len(one.clip))]
            wanted, other = (
                model.encode(mel[None], [mel.shape[1]], frames, [name]) for name in (task, SPOKEN[SPOKEN.index(task) - 1])
            )
        assert_near(found, wanted, 1e-5)
        assert not found.allclose(other, rtol=1e-2)


def reading(*texts: str) -> SpeechLM:
    """A converted language model's shape, in its own chat format, whose head reads one of these texts after another."""
    lm = make_lm(replace(LAYOUTS["pad"], chat=ChatFormat(((60, 61), (62, 63)), start=(59,), after=(64,))), combine="sum")
    model = SpeechModel(replace(lm.config, ctc="tokens", projector=ProjectorConfig("mlp", hidden=16, stack=1))).eval()
    model.decoder.load_state_dict(lm.model.decoder.state_dict())
    with torch.no_grad():
        model.decoder.audio_embedding.weight[pad_rows(lm.layout)] = 0
        model.decoder.text_embedding.weight[lm.layout.text.special("pad")] = 0
    head, table, said = model.alignment_head, model.decoder.text_embedding.weight, iter(texts)
    assert isinstance(head, TokenHead)
    head.log_temperature.data.fill_(2.0)

    def project(frames: torch.Tensor, counts: Sequence[int], task: Any = None) -> torch.Tensor:
        clips = []
        for count in counts:
            ids = lm.tokenizer.encode(next(said))
            clips.append(head.blank.weight[[0]].repeat(count, 1))
            clips[-1][1 : 2 * len(ids) : 2] = table[ids]
        return torch.cat(clips)

    head.blank.weight.data = 7 * torch.nn.functional.normalize(head.blank.weight.data, dim=-1)
    model.projector.forward = project  # type: ignore[method-assign]
    return SpeechLM(model, lm.tokenizer, lm.codec)


def test_what_a_head_of_tokens_reads_is_the_transcript() -> None:
    """Of sound that comes in pieces too, and as long as asked for; silence has none, and the conversation goes on."""
    lm = reading("who?", "and now", "", "so")
    assert lm.generate(tone(0.6), "A1T1").text == "who?"
    with lm.session(max_tokens=2) as session:
        found = session.ask(iter(tone(1.0).split(1600)), "A1T1", sample_rate=16000).answer()
        assert (found.text, found.ended, len(found.tokens)) == ("an", "length", 2)
        assert session.ask(tone(0.4), "A1T1").answer().text == ""
        assert session.ask(tone(0.4), "A1T2").answer().tokens


def test_a_question_heard_without_a_mistake_is_answered_as_if_it_were_written() -> None:
    """In a session too, whose turns before it are laid out by what was heard."""
    lm = reading("who?", "and now", "so")
    written, spoken = lm.session(max_tokens=8), lm.session(max_tokens=8)
    for text, seconds in (("who?", 0.6), ("and now", 1.0), ("so", 0.4)):
        wanted, found = written.ask(text, "T1T2").answer(), spoken.ask(tone(seconds), "A1T2").answer()
        assert found.tokens and (found.tokens, found.ended) == (wanted.tokens, wanted.ended)


def test_a_long_question_is_heard_alike_while_it_comes_and_whole() -> None:
    """By a projector each of whose features depends on others, across windows too."""
    encoder = WhisperConfig(width=16, heads=2, layers=1, window_seconds=1.28, mode="chunked", long_audio="split")
    settings = {"heads": 2, "layers": 1}
    model = make_model(LAYOUTS["pad"], 0, 0.3, encoder, ProjectorConfig("transformer", hidden=16, stack=2, settings=settings))
    (whole,) = encode_questions(model, [read_question(tone(2.5), "A1T2", model.config, Tokenizer.bytes())])
    stream = FeatureStream(model, "A1T2")
    for piece in tone(2.5).split(3000):
        stream.push(piece)
        while stream.advance():
            pass
    assert whole is not None and len(whole) == 63
    assert_near(stream.finish(), whole, 1e-5)
