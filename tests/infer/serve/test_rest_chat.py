"""Chat completions by OpenAI's own client, against what the model answers itself."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from fastapi import FastAPI

from infer.serve.app import create_app
from infer.serve.host import EngineHost
from infer.serve.rest.answers import KeptAnswers
from infer.serve.settings import ServeSettings
from omni.generate.history import Message
from omni.generate.speech_lm import SpeechLM
from tests.infer.serve.test_rest_audio import OPTIONS, at_24khz, read, wav
from tests.infer.serve.test_rest_jobs import CHAT, KEYS, app, error_of, guarded, nothing_left, post, use

__all__ = ["app", "guarded", "nothing_left"]

TEXT = "what is this"
SPEAK: Any = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}}

ABSENT: Any = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False, "logprobs": False, "frequency_penalty": 0.0}
ABSENT |= {"presence_penalty": 0, "logit_bias": {}, "response_format": {"type": "text"}}
"""Options that the model has not, as clients send them that do not ask for them."""


def text_of(said: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": said}


def sound_of(data: bytes, form: str = "wav") -> dict[str, Any]:
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": form}}
    return {"role": "user", "content": [part]}


def complete(app: FastAPI, messages: list[Any], key: str = "none", **options: Any) -> Any:
    """The completion, or all chunks of a stream."""

    async def body(client: openai.AsyncOpenAI) -> Any:
        create: Any = client.chat.completions.create
        found = await create(model="gpt-audio", messages=messages, **options)
        return [chunk async for chunk in found] if options.get("stream") else found

    return use(app, body, key)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "seed": 7}, {"temperature": 0.9, "top_p": 0.5, "seed": -3}], ids=str
)
def test_a_written_question_in_writing(app: FastAPI, lm: SpeechLM, sampling: Any) -> None:
    found = complete(app, [text_of(TEXT)], user="me", n=1, **ABSENT, **sampling)
    wanted = lm.generate(TEXT, "T1T2", **sampling, **OPTIONS)
    (choice,) = found.choices
    assert (choice.message.content, choice.message.role, choice.message.audio) == (wanted.text, "assistant", None)
    assert choice.finish_reason == "length" and found.model == "tiny"
    usage = found.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(lm.tokenizer.encode(TEXT)), len(wanted.tokens))
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    if sampling:
        assert wanted.text != lm.generate(TEXT, "T1T2", **OPTIONS).text
    else:  # without a temperature nothing is drawn, whatever top_p is
        assert complete(app, [text_of(TEXT)], top_p=0).choices[0].message.content == wanted.text


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["wav", "mp3", "flac", "opus", "pcm16"])
def test_a_spoken_question_in_sound(app: FastAPI, lm: SpeechLM, form: str) -> None:
    data = wav()
    found = complete(app, [sound_of(data)], modalities=["text", "audio"], audio={"voice": "alloy", "format": form})
    wanted = lm.generate(data, "A1A2", **OPTIONS)
    message, usage = found.choices[0].message, found.usage
    assert message.content is None and message.audio.transcript == wanted.text
    samples, expected = read(base64.b64decode(message.audio.data), form), at_24khz(wanted)
    assert len(samples) == len(expected) == 24_000
    if form in ("wav", "flac", "pcm16"):
        assert np.abs(samples - np.clip(expected, -1, 1)).max() < 1e-4
    features = lm.config.features(round(0.6 * 16_000))
    assert usage.prompt_tokens_details.audio_tokens == usage.prompt_tokens == features
    assert wanted.codes is not None and usage.completion_tokens_details.audio_tokens == wanted.codes.shape[1]
    assert usage.completion_tokens == wanted.codes.shape[1] + len(wanted.tokens)


def test_the_other_two_ways(app: FastAPI, lm: SpeechLM) -> None:
    data = wav(seed=3, rate=44_100, form="MP3")
    assert complete(app, [sound_of(data, "mp3")]).choices[0].message.content == lm.generate(data, "A1T2", **OPTIONS).text
    spoken = complete(app, [text_of(TEXT)], **SPEAK).choices[0].message.audio.transcript
    assert spoken == lm.generate(TEXT, "T1A2", **OPTIONS).text


def test_an_answer_ends_where_it_is_told_to(app: FastAPI, lm: SpeechLM) -> None:
    whole = lm.generate(TEXT, "T1T2", **OPTIONS).text
    (choice,) = complete(app, [text_of(TEXT)], stop=whole[4:6]).choices
    assert choice.finish_reason == "stop" and choice.message.content == whole[: whole.index(whole[4:6])]
    assert complete(app, [text_of(TEXT)], stop=["\0\0\0", whole[4:6]]).choices[0].message.content == choice.message.content
    for name in ("max_tokens", "max_completion_tokens"):
        found = complete(app, [text_of(TEXT)], **{name: 5})
        assert found.usage.completion_tokens == 5 and found.choices[0].finish_reason == "length"
    assert complete(app, [text_of(TEXT)], max_tokens=100_000).usage.completion_tokens == 12  # the server's own limit
    spoken = complete(app, [text_of(TEXT)], max_tokens=10, **SPEAK)
    assert spoken.usage.completion_tokens_details.audio_tokens < 10 and spoken.choices[0].finish_reason == "length"


def test_a_stream_of_text(app: FastAPI) -> None:
    whole = complete(app, [text_of(TEXT)])
    chunks = complete(app, [text_of(TEXT)], stream=True, stream_options={"include_usage": True})
    assert chunks[0].choices[0].delta.role == "assistant" and len({chunk.id for chunk in chunks}) == 1
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage and len(chunks) > 5
    assert all(chunk.usage is None and chunk.choices for chunk in complete(app, [text_of(TEXT)], stream=True))


def test_a_stream_of_text_and_sound(app: FastAPI) -> None:
    options: Any = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "pcm16"}}
    whole = complete(app, [sound_of(wav())], **options).choices[0].message.audio
    chunks = complete(app, [sound_of(wav())], stream=True, **options)
    pieces = [chunk.choices[0].delta.audio for chunk in chunks if chunk.choices[0].delta.audio is not None]
    assert "".join(piece.transcript or "" for piece in pieces) == whole.transcript
    data = [base64.b64decode(piece.data) for piece in pieces if piece.data]
    assert b"".join(data) == base64.b64decode(whole.data) and len(data) > 5
    assert {piece.id for piece in pieces[:-1]} == {pieces[0].id} and pieces[-1].expires_at > 0
    again = [sound_of(wav()), {"role": "assistant", "audio": {"id": pieces[0].id}}, text_of("and")]
    assert complete(app, again).choices[0].message.content is not None
    response = post(app, CHAT, {"messages": [text_of(TEXT)], "stream": True})
    assert response.text.endswith("data: [DONE]\n\n") and response.headers["content-type"].startswith("text/event-stream")


def test_written_turns_before_the_question(app: FastAPI, lm: SpeechLM) -> None:
    first, second = wav(seed=1), "and then"
    history: Any = [{"role": "user", "content": first}, text_of("an answer", "assistant")]
    with lm.session(history=history, **OPTIONS) as session:
        wanted = session.ask(second, "T1T2").answer()
    messages = [
        text_of("a greeting, which answers nothing", "assistant"),
        sound_of(first),
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "7", "tool_call_id": "a"},
        {"role": "assistant", "content": [{"type": "text", "text": "an answer"}]},
        text_of("a second one, which answers nothing", "assistant"),
        text_of("\n "),
        text_of(second),
    ]
    found = complete(app, messages)
    assert found.choices[0].message.content == wanted.text != lm.generate(second, "T1T2", **OPTIONS).text
    assert found.usage.prompt_tokens_details.audio_tokens == lm.config.features(round(0.6 * 16_000))
    assert found.usage.prompt_tokens_details.text_tokens == len(lm.tokenizer.encode("an answer" + second))


def test_questions_without_answers(app: FastAPI, lm: SpeechLM) -> None:
    sound = wav(seed=2)
    cut = [Message("assistant", "", cut=True, task="T1A2"), Message("assistant", "", cut=True, task="A1A2")]
    history: Any = [text_of("one\ntwo"), cut[0], {"role": "user", "content": sound}, cut[1]]
    with lm.session(history=history, **OPTIONS) as session:
        wanted = session.ask("three", "T1A2").answer()
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}, *sound_of(sound)["content"]]
    found = complete(app, [{"role": "user", "content": parts}, text_of("three")], **SPEAK)
    assert found.choices[0].message.audio.transcript == wanted.text


def test_an_answer_by_its_id(app: FastAPI, lm: SpeechLM) -> None:
    with lm.session(**OPTIONS) as session:
        first, second = session.ask(wav(), "A1A2").answer(), session.ask("again", "T1A2").answer()
    found = complete(app, [sound_of(wav())], **SPEAK).choices[0].message
    assert found.audio.transcript == first.text
    messages = [sound_of(wav()), {"role": "assistant", "audio": {"id": found.audio.id}}, text_of("again")]
    again = complete(app, messages, **SPEAK)
    assert again.choices[0].message.audio.transcript == second.text
    assert np.abs(read(base64.b64decode(again.choices[0].message.audio.data), "wav") - at_24khz(second)).max() < 1e-4
    assert first.codes is not None
    features = lm.config.features(round(0.6 * 16_000))
    assert again.usage.prompt_tokens_details.audio_tokens == features + first.codes.shape[1]


@pytest.mark.filterwarnings("ignore:the question:omni.errors.SoundWarning")
def test_a_text_before_a_spoken_questions_answer_is_no_file(app: FastAPI, tmp_path: Path) -> None:
    file = tmp_path / "secret.wav"
    file.write_bytes(wav(seed=9))
    audio_id = complete(app, [sound_of(wav())], **SPEAK).choices[0].message.audio.id
    found = []
    for named in (str(file), str(tmp_path / "nowhere.wav")):
        said = complete(app, [text_of(named), {"role": "assistant", "audio": {"id": audio_id}}, text_of("again")])
        details = said.usage.prompt_tokens_details
        found.append((details.text_tokens - len(named), details.audio_tokens))
    assert found[0] == found[1]


def test_answers_are_kept_for_their_owner(guarded: FastAPI) -> None:
    audio_id = complete(guarded, [text_of(TEXT)], KEYS[0], **SPEAK).choices[0].message.audio.id
    messages = [text_of(TEXT), {"role": "assistant", "audio": {"id": audio_id}}, text_of("again")]
    assert complete(guarded, messages, KEYS[0]).choices
    for key, one in ((KEYS[1], audio_id), (KEYS[0], "audio_of_nobody")):
        messages[1] = {"role": "assistant", "audio": {"id": one}}
        error = error_of(post(guarded, CHAT, {"messages": messages}, key=key), 400)
        assert (error["code"], error["param"]) == ("audio_not_found", "messages.1.audio.id")


def test_answers_are_kept_for_a_time_and_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.time", lambda: now)
    kept, answer = KeptAnswers(most=2, seconds=10), Message("assistant", "so")
    assert kept.add("a", "me", answer) == 1010
    now += 5
    kept.add("b", "me", answer)
    assert kept.find("a", "me") is answer and kept.find("a", "you") is None
    kept.add("c", "me", answer)
    assert kept.find("a", "me") is None and kept.find("b", "me") is answer
    now += 11
    assert kept.find("b", "me") is None
    kept.add("d", "me", answer)
    assert list(kept._answers) == ["d"]


def test_system_messages_where_the_server_uses_them(
    app: FastAPI, host: EngineHost, settings: ServeSettings, lm: SpeechLM
) -> None:
    messages = [text_of("be", "system"), text_of("brief", "developer"), text_of(TEXT)]
    plain, told = (lm.generate(TEXT, "T1T2", system=system, **OPTIONS).text for system in ("", "be\nbrief"))
    assert complete(app, messages).choices[0].message.content == plain != told
    following = create_app(host, replace(settings, answering=replace(settings.answering, use_instructions=True)))
    found = complete(following, messages)
    assert found.choices[0].message.content == told
    assert found.usage.prompt_tokens == len(lm.tokenizer.encode("be\nbrief" + TEXT))


def text_part(text: str) -> list[Any]:
    return [{"type": "text", "text": text}]


def audio(**values: Any) -> list[Any]:
    return [{"role": "user", "content": [{"type": "input_audio", "input_audio": values}]}]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [text_of("x"), text_of("y", "assistant")]}, "messages"),
        ({"messages": [text_of("")]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [*text_part("x"), *sound_of(wav())["content"]]}]}, "messages.0.content"),
        ({"messages": audio(data=base64.b64encode(wav(0.09)).decode())}, "messages.0.content.0.input_audio.data"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://localhost/"}}]}]},
            "messages.0.content.0.type",
        ),
        ({"messages": [{**sound_of(wav()), "role": "assistant"}]}, "messages.0.content.0.type"),
        ({"messages": [text_of("x" * 600)]}, None),  # more than the model's context
        ({"modalities": ["audio"], "audio": {"format": "aac"}}, "audio.format"),
        ({"modalities": ["audio"], "audio": {"format": "wav"}, "stream": True}, "audio.format"),
        ({"temperature": float("nan")}, None),
        ({"max_tokens": 0}, "max_tokens"),
    ],
    ids=str,
)
def test_requests_that_cannot_be(app: FastAPI, change: Any, param: str | None) -> None:
    error = error_of(post(app, CHAT, {"messages": [text_of(TEXT)], **change}), 400)
    assert error["param"] == param and error["type"] == "invalid_request_error"


@pytest.mark.parametrize("length", [600, 3_200, 100_001])
def test_a_question_that_is_too_long_has_one_code(app: FastAPI, length: int) -> None:
    error = error_of(post(app, CHAT, {"messages": [text_of("x" * length)]}), 400)
    assert error["code"] == "context_length_exceeded" and "overflow" not in error["message"] and "None" not in error["message"]


def test_sounds_of_a_request_have_a_length_together(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.serve.rest.messages.MOST_SECONDS", 1.0)
    error = error_of(post(app, CHAT, {"messages": [sound_of(wav(0.6)), sound_of(wav(0.6))]}), 400)
    assert error["code"] == "context_length_exceeded"
    error = error_of(post(app, CHAT, {"messages": [sound_of(wav(1.2))]}), 400)
    assert error["code"] == "invalid_audio"
