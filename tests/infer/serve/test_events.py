"""The events of a session and their order, against the types of the `openai` package."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import weakref
from typing import Any

import numpy as np
import pytest
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter

from infer.pcm import decode, encode
from infer.serve.realtime.dialogue import turns_of
from tests.infer.serve.conftest import deltas, noise, pcm, sound_of
from tests.realtime.client import written

READER: Any = TypeAdapter(RealtimeServerEvent)


def check_known(events: list[dict[str, Any]]) -> None:
    """Each is an event of the openai package's types, and has an id of its own."""
    for event in events:
        if not event["type"].startswith("omni."):
            read = READER.validate_python(event)
            assert read.type == event["type"]
            assert type(read).model_fields.keys() >= event.keys(), (type(read), event)
    ids = [event["event_id"] for event in events]
    assert len(set(ids)) == len(ids)


async def test_the_answer_is_that_of_the_python_interface(talk: Any, lm: Any) -> None:
    question = noise(0.7, seed=3)
    async with talk() as client:
        await client.send("input_audio_buffer.append", audio=pcm(question))
        await client.send("input_audio_buffer.commit")
        await client.ask()
    events = client.events
    wanted = lm.generate((np.round(np.clip(question, -1, 1) * 32767)).astype(np.int16), sample_rate=24_000, max_seconds=1.0)
    item = [event["item"] for event in events if event["type"] == "conversation.item.done"][-1]
    assert item["content"][0]["transcript"] == wanted.text
    assert abs(len(sound_of(events)) - 3 * len(wanted.audio)) <= 3


async def test_a_written_turn_in_text(talk: Any, lm: Any) -> None:
    async with talk() as client:
        await client.send("session.update", session={"type": "realtime", "output_modalities": ["text"]})
        done = await client.ask("who?")
        check_known(client.events)
        answer = client.events[client.types.index("response.created") :]
        assert not len(sound_of(answer))
        text = lm.generate("who?", "T1T2", max_tokens=12).text
        assert deltas(answer, "output_text") == text == done["output"][0]["content"][0]["text"]
        assert done["output"][0]["content"][0]["type"] == "output_text"
        assert done["output_modalities"] == ["text"] and "audio" not in done


BAD = [
    ({"type": "conversation.item.delete", "item_id": "x"}, "item_delete_invalid_item_id"),
    ({"type": "conversation.item.truncate", "item_id": "a", "content_index": 0, "audio_end_ms": 0}, "invalid_value"),
    ({"type": "input_audio_buffer.append", "audio": "%%%"}, "invalid_base64"),
    ({"type": "input_audio.append"}, "invalid_event_type"),
    ({"type": "output_audio_buffer.clear"}, "invalid_event"),
]


async def test_mistakes_have_codes(talk: Any) -> None:
    async with talk() as client:
        await client.send("conversation.item.create", item={**written("a"), "id": "a"})
        for event, code in BAD:
            (came,) = await client.send(**event)
            assert (came["error"]["code"], came["error"]["type"]) == (code, "invalid_request_error")
        check_known(client.events)


async def test_nothing_to_answer_fails_as_a_response(talk: Any) -> None:
    async with talk() as client:
        done = await client.ask()
        assert done["status"] == "failed" and "question" in done["status_details"]["error"]["message"]
        assert done["output"] == []
        assert (await client.ask("and now"))["status"] in ("completed", "incomplete")
        check_known(client.events)


@pytest.mark.long
async def test_transcripts_and_transcription_sessions(talk: Any, lm: Any) -> None:
    question = noise(0.7, seed=3)
    wanted = lm.generate((question * 32767).astype(np.int16), "A1T1", sample_rate=24_000, max_tokens=512).text.strip()
    async with talk(given={"type": "transcription", "audio": {"input": {"turn_detection": None}}}) as client:
        await client.send("input_audio_buffer.append", audio=pcm(question))
        await client.send("input_audio_buffer.commit")
        done = await client.until("conversation.item.input_audio_transcription.completed")
        assert done["transcript"] == wanted
        assert done["usage"] == {"type": "duration", "seconds": 0.7}
        assert (await client.send("response.create"))[0]["error"]["code"] == "invalid_session_type"
        kept = (await client.send("conversation.item.retrieve", item_id=done["item_id"]))[0]["item"]
        assert kept["content"] == [{"type": "input_audio", "transcript": wanted, "audio": pcm(question)}]
        check_known(client.events)


@pytest.mark.long
async def test_answers_are_freed_as_soon_as_another_one_follows(talk: Any) -> None:
    """Found by the garbage collector alone, they would grow with the square of a conversation, and its pauses with them."""
    async with talk() as client:
        gone = []
        gc.collect()
        gc.disable()
        try:
            for text in ("one", "two", "three"):
                await client.ask(text)
                gone.append(weakref.ref(client.session.responses.last))
            await asyncio.sleep(0.05)
            assert [ref() is None for ref in gone] == [True, True, False]
        finally:
            gc.enable()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [1, 3, 999, 4801, 65537])
async def test_pieces_of_any_size_are_the_same_sound(talk: Any, size: int) -> None:
    sound = base64.b64decode(pcm(noise(0.2 if size < 99 else 2.0)))
    async with talk() as client:
        for start in range(0, len(sound), size):
            audio = base64.b64encode(sound[start : start + size]).decode()
            assert await client.send("input_audio_buffer.append", audio=audio) == []
        await client.send("input_audio_buffer.commit")
        assert next(iter(client.session.items)).content[0].sound.tobytes() == sound
        await client.send("input_audio_buffer.append", audio=base64.b64encode(sound + b"\1").decode())
        await client.send("input_audio_buffer.clear")  # half a sample of what was dropped is none of the next
        await client.send("input_audio_buffer.append", audio=base64.b64encode(sound).decode())
        await client.send("input_audio_buffer.commit")
        assert list(client.session.items)[-1].content[0].sound.tobytes() == sound


@pytest.mark.parametrize("before", ["", "data:audio/pcm;base64,", " DATA:audio/pcm;rate=24000;base64,\r\n"])
@pytest.mark.parametrize("between", ["\n", "\r\n", " \t"])
async def test_base64_in_lines_and_of_a_data_url_is_taken(talk: Any, before: str, between: str) -> None:
    sound = pcm(noise(0.3))
    audio = before + between.join(sound[start : start + 76] for start in range(0, len(sound), 76)) + between
    async with talk() as client:
        await client.send("input_audio_buffer.append", audio=audio)
        await client.send("input_audio_buffer.commit")
        content = [{"type": "input_audio", "audio": audio}]
        await client.send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
        assert [item.content[0].sound.tobytes() for item in client.session.items] == [base64.b64decode(sound)] * 2


@pytest.mark.parametrize("form", ["audio/pcm", "audio/pcmu", "audio/pcma"])
async def test_what_was_said_can_be_retrieved(talk: Any, form: str) -> None:
    question = noise(0.6, rate=24_000 if form == "audio/pcm" else 8000)
    data = encode(question, form)
    async with talk() as client:
        await client.send("session.update", session={"audio": {"input": {"format": {"type": form}}}})
        await client.send("input_audio_buffer.append", audio=base64.b64encode(data).decode())
        await client.send("input_audio_buffer.commit")
        (item,) = client.session.items
        (came,) = await client.send("conversation.item.retrieve", item_id=item.id)
        kept = base64.b64decode(came["item"]["content"][0]["audio"])
        if form == "audio/pcm":
            assert kept == data
        else:
            assert abs(len(kept) - len(data)) < 80
            again, least = decode(kept, form)[400:4000], decode(data, form)[400:4000]
            assert np.corrcoef(again, least)[0, 1] > 0.9
        check_known(client.events)


async def test_what_is_retrieved_is_no_larger_than_clients_take(talk: Any) -> None:
    async with talk() as client:
        parts = [{"type": "input_audio", "audio": pcm(np.zeros(24_000)), "transcript": "long"}] * 20
        await client.send("conversation.item.create", item={**written(""), "content": parts})
        (item,) = client.session.items
        (came,) = await client.send("conversation.item.retrieve", item_id=item.id)
        assert came["item"] == item.shown() and len(json.dumps(came)) < 2**20


@pytest.mark.long
async def test_a_response_without_a_question_answers_the_instructions(talk: Any, lm: Any) -> None:
    async with talk() as client:
        await client.send("session.update", session={"instructions": "greet the user"})
        first = await client.ask()
        await client.send("conversation.item.create", item=written("now say goodbye", "system"))
        asked = [first, await client.ask(), await client.ask(instructions="say a number")]
        asked.append(await client.ask(conversation="none", input=[], instructions="say a number"))
        assert all(done["status"] in ("completed", "incomplete") for done in asked), asked
        prompts = [item.prompt.text for item in client.session.items if item.role == "assistant"]
        assert prompts == ["greet the user", "now say goodbye", "say a number"]
        before, _ = turns_of(client.session.items)
        assert [turn.part.text for turn in before] == prompts and all(turn.answer.answer for turn in before)
        await client.ask("and then?")
        marks = [turn.mark for turn in turns_of(client.session.items)[0]]
        assert client.session.responses.dialogue._marks == marks  # the engine's session went on, and knows them
        check_known(client.events)


@pytest.mark.long
@pytest.mark.parametrize("detection", [None, {"type": "server_vad"}, {"type": "semantic_vad"}])
async def test_a_committed_sound_without_speech_has_no_answer(talk: Any, detection: Any) -> None:
    silence = np.zeros(24_000) if detection is None else noise(1.0)
    async with talk() as client:
        await client.ask("hello")
        heard = {"turn_detection": detection, "transcription": {"model": "any"}}
        await client.send("session.update", session={"audio": {"input": heard}})
        await client.send("input_audio_buffer.append", audio=pcm(silence))
        await client.send("input_audio_buffer.commit")
        done = await client.until("conversation.item.input_audio_transcription.completed")
        assert done["transcript"] == ""
        for _ in range(2):
            failed = await client.ask(instructions="say a number")
            assert failed["status"] == "failed" and failed["status_details"]["error"]["code"] == "no_speech"
        assert (await client.ask("and now?"))["status"] in ("completed", "incomplete")
        check_known(client.events)
