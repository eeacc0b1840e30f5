"""Transcriptions and speech over plain HTTP, by OpenAI's own client, against what the model says itself."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import struct
import time
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
import torch
from fastapi import FastAPI

from infer.pcm import PCM_RATE, Resampler
from infer.serve.app import create_app
from infer.serve.host import EngineHost
from infer.serve.rest.answers import MEDIA, encoded
from infer.serve.rest.audio import SPEECH
from infer.serve.rest.messages import decoded
from infer.serve.settings import ServeSettings
from omni.audio.wav import wav_header
from omni.generate.answer_stream import AnswerStream
from omni.generate.results import AudioChunk
from omni.generate.speech_lm import SpeechLM
from tests.infer.serve.conftest import noise
from tests.infer.serve.test_rest_jobs import app, connected, error_of, nothing_left, post, use
from tests.sounds import by_ffmpeg
from tests.sounds import encoded as sound_file

__all__ = ["app", "nothing_left"]

SPEECHES, TRANSCRIPTIONS = "/v1/audio/speech", "/v1/audio/transcriptions"
TEXT = "say something"
OPTIONS: Any = {"max_seconds": 1.0, "max_tokens": 12}
"""Those of the fixture `settings`."""


def wav(seconds: float = 0.6, rate: int = 16_000, form: str = "WAV", seed: int = 0) -> bytes:
    """A sound file's bytes."""
    out = io.BytesIO()
    soundfile.write(out, noise(seconds, seed, rate), rate, format=form)
    return out.getvalue()


@pytest.fixture(autouse=True)
def short_transcripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model never ends one by itself, and what it hears here is noise."""
    monkeypatch.setattr("infer.serve.rest.audio.TRANSCRIPT_TOKENS", 12)
    monkeypatch.setattr("infer.serve.rest.audio.SPEECH", 0.0)


def at_24khz(answer: Any) -> np.ndarray:
    """Samples [S] of an answer of the model, as responses have them."""
    rate = Resampler(answer.sample_rate, PCM_RATE)
    return np.concatenate([rate.push(answer.audio.numpy()), rate.finish()])


def read(data: bytes, form: str) -> np.ndarray:
    """Samples [S] of a response's sound."""
    if form.startswith("pcm"):
        return np.frombuffer(data, "<i2").astype(np.float32) / 32767
    samples, rate = soundfile.read(io.BytesIO(data), dtype="float32")
    assert rate == 24_000 and samples.ndim == 1
    return samples


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["WAV", "FLAC", "OGG", "MP3"])
async def test_a_transcription_is_the_models(app: FastAPI, lm: SpeechLM, form: str) -> None:
    data = wav(form=form)
    text = lm.generate(data, "A1T1", **OPTIONS).text.strip()
    assert text
    async with connected(app) as client:
        create: Any = client.audio.transcriptions.create
        found = await create(model="whisper-1", file=(f"a.{form}", data), language="en", prompt="names")
        assert found.text == text and abs(found.usage.seconds - 0.6) < 0.1 and found.usage.type == "duration"
        if form == "WAV":
            assert await create(model="x", file=data, response_format="text") == f"{text}\n"
            told = await create(model="x", file=data, response_format="verbose_json", language="en")
            assert (told.text, told.language, told.duration) == (text, "en", 0.6)
            events = [event async for event in await create(model="x", file=data, stream=True)]
            assert [event.type for event in events[-2:]] == ["transcript.text.delta", "transcript.text.done"]
            assert events[-1].text == text == "".join(event.delta for event in events[:-1]).strip()
            assert events[-1].usage.seconds == 0.6
            drawn = await create(model="x", file=data, temperature=1.0)
            assert drawn.text == lm.generate(data, "A1T1", temperature=1.0, **OPTIONS).text.strip() != text


def test_transcriptions_that_cannot_be(app: FastAPI) -> None:
    def refused(files: Any, fields: Any, param: str | None) -> str:
        async def body(client: openai.AsyncOpenAI) -> Any:
            return await client._client.post(f"http://localhost{TRANSCRIPTIONS}", files=files, data=fields)

        error = error_of(use(app, body), 400)
        assert error["param"] == param
        return error["message"]

    sound = {"file": ("a.wav", wav())}
    for form in ("srt", "vtt"):
        assert "times" in refused(sound, {"response_format": form}, "response_format")
    refused(sound, {"temperature": "warm"}, "temperature")
    for name in ("timestamp_granularities[]", "timestamp_granularities", "include[]", "known_speaker_names[]"):
        assert name in refused(sound, {name: "word", "response_format": "verbose_json"}, name)
    refused({"other": ("a.wav", wav())}, {}, "file")
    assert "30 s" in refused({"file": ("a.flac", wav(31.0, form="FLAC"))}, {}, "file")
    assert "truncated" in refused({"file": ("a.wav", wav()[:5000])}, {}, "file")
    assert refused({"file": ("a.wav", b"")}, {}, "file") == "file is empty; send a sound file"
    assert "too short" in refused({"file": ("a.wav", wav(1 / 16_000))}, {}, "file")
    broken = post(app, TRANSCRIPTIONS, b"no form", headers={"content-type": "multipart/form-data"})
    assert error_of(broken, 400)["code"] == "invalid_form"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("form", "codec"), [("ipod", "aac"), ("mp4", "aac"), ("webm", "libopus"), ("adts", "aac")])
async def test_what_browsers_and_telephones_record_is_transcribed(app: FastAPI, lm: SpeechLM, form: str, codec: str) -> None:
    data = by_ffmpeg(noise(0.6, 0, 48_000), form, codec, 48_000)
    text = lm.generate(data, "A1T1", **OPTIONS).text.strip()
    assert text
    async with connected(app) as client:
        assert (await client.audio.transcriptions.create(model="x", file=(f"a.{form}", data))).text == text


async def test_nothing_is_transcribed_where_nobody_speaks(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.serve.rest.audio.SPEECH", SPEECH)
    async with connected(app) as client:
        create: Any = client.audio.transcriptions.create
        for samples in (np.zeros(32_000), np.random.default_rng(0).normal(0, 0.05, 32_000)):
            data = sound_file(samples)
            assert (await create(model="x", file=data)).text == ""
            events = [event async for event in await create(model="x", file=data, stream=True)]
            assert [(event.type, event.text) for event in events] == [("transcript.text.done", "")]


async def test_two_sounds_are_decoded_at_once(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    running, most = [], []

    def slow(*arguments: Any) -> Any:
        running.append(1)
        most.append(len(running))
        time.sleep(0.02)
        running.pop()
        return decoded(*arguments)

    monkeypatch.setattr("infer.serve.rest.audio.decoded", slow)
    async with connected(app) as client:
        create: Any = client.audio.transcriptions.create
        await asyncio.gather(*(create(model="x", file=wav()) for _ in range(8)))
    assert len(most) == 8 and max(most) == 2


async def test_a_file_that_unfolds_is_refused_before_it_is_decoded(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    soundfile.write(out, np.zeros(1000 * 16_000, np.int16), 16_000, format="FLAC")
    assert len(out.getvalue()) < 60_000
    monkeypatch.setattr("omni.audio.io._decode", lambda *args: pytest.fail("it was decoded"))
    async with connected(app) as client:
        with pytest.raises(openai.BadRequestError, match="lasts 1000"):
            await client.audio.transcriptions.create(model="any", file=("a.flac", out.getvalue()))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["mp3", "wav", "flac", "opus", "pcm"])
def test_speech_is_the_models_in_every_format(app: FastAPI, lm: SpeechLM, form: Any) -> None:
    wanted = at_24khz(lm.generate(TEXT, "T1A1", **OPTIONS))

    async def body(client: openai.AsyncOpenAI) -> Any:
        given: Any = {} if form == "mp3" else {"response_format": form}  # mp3 by default
        return await client.audio.speech.create(model="tts-1", voice={"id": "mine"}, input=TEXT, speed=1.0, **given)

    response = use(app, body)
    assert response.response.headers["content-type"] == MEDIA[form]
    data = response.content
    if form == "wav":
        assert data[:44] == wav_header(24_000) and struct.unpack("<I32xI", data[4:44]) == (0xFFFFFFFF, 0xFFFFFFFF)
    samples = read(data, form)
    assert len(samples) == len(wanted) == 24_000
    if form in ("wav", "flac", "pcm"):
        assert np.abs(samples - np.clip(wanted, -1, 1)).max() < 1e-4
    else:
        assert np.corrcoef(samples, wanted)[0, 1] > 0.7


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["pcm", "wav", "flac"])
def test_speech_as_events(app: FastAPI, lm: SpeechLM, form: str) -> None:
    given = {"input": TEXT, "voice": "alloy", "response_format": form}
    plain = post(app, SPEECHES, given).content
    response = post(app, SPEECHES, {**given, "stream_format": "sse"})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]
    assert {event["type"] for event in events[:-1]} == {"speech.audio.delta"}
    assert b"".join(base64.b64decode(event["audio"]) for event in events[:-1]) == plain
    assert len(events) > 5 or form == "flac"
    codes = lm.generate(TEXT, "T1A1", **OPTIONS).codes
    assert codes is not None
    read_tokens, frames = len(lm.tokenizer.encode(TEXT)), codes.shape[1]
    usage = {"input_tokens": read_tokens, "output_tokens": frames, "total_tokens": read_tokens + frames}
    assert events[-1] == {"type": "speech.audio.done", "usage": usage}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"response_format": "aac"}, "response_format"),
        ({"input": ""}, "input"),
        ({"input": "x" * 4097}, "input"),
        ({"speed": 1.5}, "speed"),
        ({"input": "x" * 600}, None),  # more than the model's context
    ],
)
def test_speech_that_cannot_be(app: FastAPI, change: Any, param: str | None) -> None:
    for form in ("mp3", "pcm"):
        error = error_of(post(app, SPEECHES, {"input": TEXT, "voice": "alloy", "response_format": form, **change}), 400)
        assert error["param"] == param


@pytest.mark.parametrize("form", ["mp3", "wav", "pcm"])
def test_an_answer_without_sound_is_told(app: FastAPI, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    real = AnswerStream.__anext__

    async def silent(self: AnswerStream) -> Any:
        while isinstance(event := await real(self), AudioChunk):
            pass
        return event

    monkeypatch.setattr(AnswerStream, "__anext__", silent)
    assert error_of(post(app, SPEECHES, {"input": TEXT, "response_format": form}), 500)["code"] == "no_sound"


def test_a_model_without_sound_does_not_speak(host: EngineHost, settings: ServeSettings) -> None:
    silent = create_app(host, settings)
    silent.state.server.voices.speaks = False
    assert error_of(post(silent, SPEECHES, {"input": TEXT}), 400)["code"] == "model_not_supported"
    given = {"messages": [{"role": "user", "content": TEXT}], "modalities": ["text", "audio"]}
    assert error_of(post(silent, "/v1/chat/completions", given), 400)["param"] == "modalities"


def test_a_whole_wav_tells_its_length() -> None:
    data = encoded(torch.zeros(50), PCM_RATE, "wav")
    assert len(data) == 144 and struct.unpack("<I32xI", data[4:44]) == (136, 100)


@pytest.mark.parametrize("form", list(MEDIA))
def test_sound_without_samples_is_a_file_all_the_same(form: str) -> None:
    assert len(read(encoded(torch.zeros(0), PCM_RATE, form), form)) <= 240
