"""Mistakes of clients: what is refused, by which name, and that the conversation goes on afterwards."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from infer.serve.host import EngineHost
from infer.serve.realtime.responses import Response
from infer.serve.settings import ServeSettings
from omni.errors import EngineLost
from omni.generate.question import longest
from omni.generate.results import Ended, Timings
from omni.generate.speech_lm import SpeechLM
from tests.infer.serve.caller import LocalEngine
from tests.infer.serve.conftest import MANUAL, noise, opened_client, pcm
from tests.infer.serve.test_events import check_known
from tests.realtime.client import written

GOOD = ("completed", "incomplete")


def spoken(audio: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_audio", "audio": audio}]}


async def test_sound_that_is_too_long_is_refused_at_its_commit_and_kept(talk: Any, lm: SpeechLM) -> None:
    most = longest(lm.config)
    async with talk() as client:
        await client.send("input_audio_buffer.append", audio=pcm(noise(most + 1)))
        (came,) = await client.send("input_audio_buffer.commit", event_id="mine")
        error = came["error"]
        assert (error["type"], error["code"], error["event_id"]) == ("invalid_request_error", "invalid_value", "mine")
        assert error["param"] == "audio" and f"{most + 1:g}.0 s" in error["message"] and f"{most:g} s" in error["message"]
        assert "input_audio_buffer.clear" in error["message"]
        assert not len(client.session.items) and client.session.hearing.buffer.seconds == most + 1
        await client.send("input_audio_buffer.clear")
        await client.send("input_audio_buffer.append", audio=pcm(noise(most)))
        await client.send("input_audio_buffer.commit")
        error = (await client.ask())["status_details"]["error"]  # more than the tiny model's context, but not of its encoder
        assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
        assert (await client.ask("and now?"))["status"] in GOOD
        check_known(client.events)


async def test_sound_that_is_too_long_for_a_turn_of_the_server_is_cut(talk: Any, lm: SpeechLM) -> None:
    most = longest(lm.config)
    async with talk() as client:
        hearing = client.session.hearing
        hearing.buffer.add(np.zeros(round((most + 3) * 24_000), np.int16))
        hearing._item = "item_1"
        hearing._end_turn(most + 3, most + 3, None)
        (item,) = client.session.items
        assert item.seconds == most


BAD_ITEMS = {
    "long": (spoken(pcm(np.zeros(31 * 24_000))), "audio", "31.0 s"),
    "empty": (spoken(""), "audio", "has 0 bytes"),
    "surrogate": (written("a \ud800"), "text", "unicode"),
    "assistant's": (written("\udfff", "assistant", "output_text"), "text", "unicode"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", BAD_ITEMS)
async def test_an_item_that_no_question_can_be_is_refused(talk: Any, name: str) -> None:
    item, field, told = BAD_ITEMS[name]
    async with talk() as client:
        (came,) = await client.send("conversation.item.create", item=item, event_id="mine")
        error = came["error"]
        assert (error["type"], error["code"], error["event_id"]) == ("invalid_request_error", "invalid_value", "mine")
        assert error["param"] == f"item.content.0.{field}" and told in error["message"]
        assert not len(client.session.items)
        (came,) = await client.send("response.create", response={"input": [item]})
        assert came["error"]["param"] == f"response.input.0.content.0.{field}"
        assert (await client.ask("and now?"))["status"] in GOOD
        check_known(client.events)


async def test_what_does_not_fit_into_the_context_is_the_clients_mistake(lm: SpeechLM, settings: ServeSettings) -> None:
    host = EngineHost(lambda: LocalEngine(lm))
    answering = replace(settings.answering, context=200, use_instructions=True)
    async with opened_client(host, replace(settings, answering=answering), MANUAL) as client:
        error = (await client.ask("who? " * 100))["status_details"]["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
        assert "shorten instructions, history or question" in error["message"] and "overflow" not in error["message"]
        assert (await client.ask("who?"))["status"] in GOOD
        assert (await client.ask("you?"))["status"] in GOOD
        await client.send("session.update", session={"instructions": "be brief " * 40})
        error = (await client.ask("we?"))["status_details"]["error"]
        assert error["code"] == "context_length_exceeded"
        await client.send("session.update", session={"instructions": ""})
        assert (await client.ask())["status"] in GOOD  # the same question
        check_known(client.events)


LOST = "the engine's process 32168 was ended by SIGKILL; start another one"


async def broken(*_: Any) -> None:
    raise KeyError("secret")


async def lost(*_: Any) -> None:
    raise EngineLost(LOST)


async def lost_midway(response: Response, *_: Any) -> Ended:
    response.dialogue.engine = SimpleNamespace(alive=False)
    return Ended("error", Timings(), LOST)


@pytest.mark.parametrize(
    ("answer", "code", "told"),
    [(broken, "server_error", "KeyError"), (lost, "engine_lost", "again"), (lost_midway, "engine_lost", "")],
)
async def test_what_is_the_servers_fault(talk: Any, monkeypatch: Any, answer: Any, code: str, told: str) -> None:
    async with talk() as client:
        monkeypatch.setattr(Response, "_answer", answer)
        error = (await client.ask("who?"))["status_details"]["error"]
        assert (error["type"], error["code"]) == ("server_error", code) and told in error["message"]
        assert not any(word in error["message"] for word in ("32168", "SIGKILL", "another one", "secret"))


VAD = {"type": "server_vad", "threshold": 7}

PLACES = {
    "max_output_tokens": ({"max_output_tokens": 0}, "max_output_tokens"),
    "voice": ({"audio": {"output": {"voice": 3}}}, "audio.output.voice"),
    "threshold": ({"audio": {"input": {"turn_detection": VAD}}}, "audio.input.turn_detection.threshold"),
    "detection": ({"audio": {"input": {"turn_detection": {"type": "none"}}}}, "audio.input.turn_detection"),
    "tool_choice": ({"tool_choice": 7}, "tool_choice"),
    "tools": ({"tools": [3]}, "tools.0"),
    "surrogate": ({"instructions": "\ud800"}, "instructions"),
}


@pytest.mark.parametrize("name", PLACES)
async def test_a_mistake_in_the_configuration_is_named_by_its_place(talk: Any, name: str) -> None:
    given, place = PLACES[name]
    async with talk() as client:
        error = (await client.send("session.update", session=given))[0]["error"]
        assert error["param"] == f"session.{place}" and error["message"].startswith(f"session.{place}: ")
        if "input" not in given.get("audio", {}):
            error = (await client.send("response.create", response=given))[0]["error"]
            assert error["param"] == f"response.{place}"


async def test_what_has_no_effect_is_not_told_as_if_it_had(talk: Any) -> None:
    tools = [{"type": "function", "name": "f"}]
    given = {
        "model": "gpt-x",
        "tools": tools,
        "tool_choice": {"type": "function", "name": "f"},
        "tracing": "auto",
        "prompt": {"id": "p"},
        "include": ["item.input_audio_transcription.logprobs"],
        "truncation": "disabled",
        "audio": {"input": {"noise_reduction": {"type": "near_field"}}},
    }
    async with talk() as client:
        told = (await client.send("session.update", session=given))[0]["session"]
        assert told["model"] == "tiny" and told["tools"] == tools
        assert (told["tool_choice"], told["truncation"]) == ("auto", "auto")
        for name in ("tracing", "prompt", "include"):
            assert told[name] is None
        assert told["audio"]["input"]["noise_reduction"] is None
        check_known(client.events)


async def test_a_cut_tells_what_is_heard_in_the_end(talk: Any) -> None:
    async with talk() as client:
        item = (await client.ask("who?"))["output"][0]["id"]
        for given, heard in ((600, 600), (330, 330), (500, 330), (0, 0), (700, 0)):
            (came,) = await client.send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=given)
            assert came["type"] == "conversation.item.truncated" and came["audio_end_ms"] == heard
