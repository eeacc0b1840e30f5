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
from tests.infer.serve.conftest import Client, deltas, noise, pcm, sound_of

READER: Any = TypeAdapter(RealtimeServerEvent)

TURN = [
    "response.created",
    "rate_limits.updated",
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
    "response.output_audio.done",
    "response.output_audio_transcript.done",
    "response.content_part.done",
    "conversation.item.done",
    "response.output_item.done",
    "response.done",
]


def check_known(events: list[dict[str, Any]]) -> None:
    """Each is an event of the openai package's types, and has an id of its own."""
    for event in events:
        if not event["type"].startswith("omni."):
            read = READER.validate_python(event)
            assert read.type == event["type"]
            assert type(read).model_fields.keys() >= event.keys(), (type(read), event)
    ids = [event["event_id"] for event in events]
    assert len(set(ids)) == len(ids)


def nulls(value: Any, path: str = "") -> list[str]:
    """Places of the nulls in an event."""
    if isinstance(value, dict):
        return [place for key, one in value.items() for place in nulls(one, f"{path}.{key}")]
    if isinstance(value, list):
        return [place for one in value for place in nulls(one, path)]
    return [path] if value is None else []


def test_a_spoken_turn_in_its_order(talk: Any) -> None:
    async def body(client: Client) -> None:
        await client.send("input_audio_buffer.append", audio=pcm(noise(0.6)))
        since = len(client.events)
        await client.send("input_audio_buffer.commit")
        assert client.types[since:] == ["input_audio_buffer.committed", "conversation.item.added", "conversation.item.done"]
        await client.ask()
        check_known(client.events)
        answer = client.events[since + 3 :]
        kinds = [event["type"] for event in answer if not event["type"].endswith(".delta")]
        assert kinds == TURN
        done = answer[-1]["response"]
        assert done["status"] in ("completed", "incomplete") and "conversation_id" in done
        transcript = next(event for event in answer if event["type"].endswith("transcript.done"))["transcript"]
        assert deltas(answer) == transcript == done["output"][0]["content"][0]["transcript"]
        sound = sound_of(answer)
        usage = done["usage"]
        assert len(sound) == usage["output_token_details"]["audio_tokens"] * 960  # 40 ms at 24 kHz
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0
        part = next(event for event in answer if event["type"] == "response.content_part.added")["part"]
        assert part == {"type": "audio", "transcript": ""}
        for event in client.events[1:]:
            kept = [".previous_item_id"] if event["type"].startswith(("conversation.item", "input_audio")) else []
            assert all(place in (*kept, ".item.content.transcript") for place in nulls(event)), event

    talk(body)


def test_the_answer_is_that_of_the_python_interface(talk: Any, lm: Any) -> None:
    question = noise(0.7, seed=3)

    async def body(client: Client) -> list[dict[str, Any]]:
        await client.send("input_audio_buffer.append", audio=pcm(question))
        await client.send("input_audio_buffer.commit")
        await client.ask()
        return client.events

    events = talk(body)
    wanted = lm.generate((np.round(np.clip(question, -1, 1) * 32767)).astype(np.int16), sample_rate=24_000, max_seconds=1.0)
    item = [event["item"] for event in events if event["type"] == "conversation.item.done"][-1]
    assert item["content"][0]["transcript"] == wanted.text
    assert abs(len(sound_of(events)) - 3 * len(wanted.audio)) <= 3


def test_a_written_turn_in_text(talk: Any, lm: Any) -> None:
    async def body(client: Client) -> None:
        await client.send("session.update", session={"type": "realtime", "output_modalities": ["text"]})
        done = await client.ask("who?")
        check_known(client.events)
        answer = client.events[client.types.index("response.created") :]
        assert not len(sound_of(answer))
        text = lm.generate("who?", "T1T2", max_tokens=12).text
        assert deltas(answer, "output_text") == text == done["output"][0]["content"][0]["text"]
        assert done["output"][0]["content"][0]["type"] == "output_text"
        assert done["output_modalities"] == ["text"] and "audio" not in done

    talk(body)


@pytest.mark.long
def test_g711_both_ways(talk: Any) -> None:
    async def body(client: Client) -> None:
        for form in ("audio/pcmu", "audio/pcma"):
            change = {"input": {"format": {"type": form}}, "output": {"format": {"type": form}}}
            updated = (await client.send("session.update", session={"type": "realtime", "audio": change}))[-1]
            assert updated["session"]["audio"]["input"]["format"] == {"type": form}
            since = len(client.events)
            await client.send("input_audio_buffer.append", audio=pcm(noise(0.2, rate=8000)))  # 0.4 s of bytes
            await client.send("input_audio_buffer.commit")
            done = await client.ask()
            audio = sum(len(sound_of([event])) * 2 for event in client.events[since:])
            assert audio == done["usage"]["output_token_details"]["audio_tokens"] * 320

    talk(body)


def test_items_are_created_retrieved_and_deleted(talk: Any) -> None:
    async def body(client: Client) -> None:
        def item(name: str, **more: Any) -> dict[str, Any]:
            content = [{"type": "input_text", "text": name}]
            return {"item": {"type": "message", "role": "user", "id": name, "content": content}, **more}

        await client.send("conversation.item.create", **item("b"))
        await client.send("conversation.item.create", **item("a", previous_item_id="root"))
        added = await client.send("conversation.item.create", **item("c", previous_item_id="a"))
        assert added[0]["previous_item_id"] == "a"
        assert [one.id for one in client.session.items] == ["a", "c", "b"]
        call = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
        await client.send("conversation.item.create", item=call)
        output = {"type": "function_call_output", "call_id": "call_1", "output": "{}"}
        await client.send("conversation.item.create", item=output)
        assert client.events[-1]["item"] | output == client.events[-1]["item"]
        assert (await client.send("conversation.item.retrieve", item_id="c"))[0]["item"]["content"][0]["text"] == "c"
        assert (await client.send("conversation.item.delete", item_id="c"))[0] == {
            **client.events[-1],
            "type": "conversation.item.deleted",
            "item_id": "c",
        }
        assert [one.id for one in client.session.items][:2] == ["a", "b"]
        check_known(client.events)

    talk(body)


BAD = {
    "duplicate": ({"type": "conversation.item.create", "item": "ITEM"}, "item_create_duplicate_item_id"),
    "retrieve": ({"type": "conversation.item.retrieve", "item_id": "x"}, "item_retrieve_invalid_item_id"),
    "delete": ({"type": "conversation.item.delete", "item_id": "x"}, "item_delete_invalid_item_id"),
    "user's": ({"type": "conversation.item.truncate", "item_id": "a", "content_index": 0, "audio_end_ms": 0}, None),
    "cancel": ({"type": "response.cancel"}, "response_cancel_not_active"),
    "commit": ({"type": "input_audio_buffer.commit"}, "input_audio_buffer_commit_empty"),
    "base64": ({"type": "input_audio_buffer.append", "audio": "%%%"}, "invalid_base64"),
    "type": ({"type": "input_audio.append"}, "invalid_event_type"),
    "buffer": ({"type": "output_audio_buffer.clear"}, "invalid_event"),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_an_error_event_that_names_the_clients(talk: Any, name: str) -> None:
    event, code = BAD[name]

    def item(item_id: str) -> dict[str, Any]:
        return {"type": "message", "role": "user", "id": item_id, "content": [{"type": "input_text", "text": "a"}]}

    async def body(client: Client) -> None:
        await client.send("conversation.item.create", item=item("a"))
        given = {
            key: {"ITEM": item("a"), "OTHER": item("b")}.get(value, value) if isinstance(value, str) else value
            for key, value in event.items()
        }
        kind = given.pop("type", None)
        came = await client.send(kind, event_id="mine", **given)
        assert [one["type"] for one in came] == ["error"]
        error = came[0]["error"]
        assert error["event_id"] == "mine" and error["type"] == "invalid_request_error"
        assert code is None or error["code"] == code
        if name == "cancel":
            assert error["message"].startswith("Cancellation failed")
        check_known(client.events)

    talk(body)


def test_text_that_is_no_event(talk: Any) -> None:
    async def body(client: Client) -> None:
        for text in ("", "{", "[]", "1", '"x"', "[" * 100_000, b"\xff\xfe"):
            before = len(client.events)
            await client.session.handle(text)
            assert [event["type"] for event in client.events[before:]] == ["error"]

    talk(body)


def test_settings_change_by_parts_and_are_told_whole(talk: Any) -> None:
    async def body(client: Client) -> None:
        first = client.events[0]["session"]
        assert first["audio"]["input"]["turn_detection"]["interrupt_response"] is True
        change = {"audio": {"input": {"transcription": {"model": "whisper-9"}}, "output": {"voice": "marin", "speed": 1.3}}}
        harmless = {"tracing": "auto", "tools": [{"type": "function", "name": "f"}], "model": "gpt-9", "something": 1}
        after = (await client.send("session.update", session={"type": "realtime", **change, **harmless}))[0]["session"]
        assert after["audio"]["input"]["turn_detection"] == first["audio"]["input"]["turn_detection"]
        assert after["audio"]["input"]["transcription"] == {"model": "whisper-9"}
        assert after["audio"]["output"] == {**first["audio"]["output"], "voice": "default", "speed": 1.0}
        semantic = {"audio": {"input": {"turn_detection": {"type": "semantic_vad"}}}}
        after = (await client.send("session.update", session=semantic))[0]["session"]
        detection = {"type": "semantic_vad", "eagerness": "auto", "create_response": True, "interrupt_response": True}
        assert after["audio"]["input"]["turn_detection"] == detection
        assert after["audio"]["input"]["transcription"] == {"model": "whisper-9"}
        check_known(client.events)

    talk(body, given=None)


def test_a_second_answer_waits_and_a_cancelled_one_is_told(talk: Any) -> None:
    async def body(client: Client) -> None:
        await client.ask("first")
        since = len(client.events)
        content = [{"type": "input_text", "text": "second"}]
        await client.send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
        await client.send("response.create")
        await client.until("response.output_audio.delta", since)
        came = await client.send("response.create", event_id="again")
        assert came[-1]["error"]["code"] == "conversation_already_has_active_response"
        await client.send("response.cancel")
        done = client.events[-1]["response"]
        assert done["status"] == "cancelled"
        assert done["status_details"] == {"type": "cancelled", "reason": "client_cancelled"}
        before = len(client.events)
        await asyncio.sleep(0.2)
        assert len(client.events) == before
        check_known(client.events)

    talk(body)


def test_nothing_to_answer_fails_as_a_response(talk: Any) -> None:
    async def body(client: Client) -> None:
        done = await client.ask()
        assert done["status"] == "failed" and "question" in done["status_details"]["error"]["message"]
        assert done["output"] == []
        assert (await client.ask("and now"))["status"] in ("completed", "incomplete")
        check_known(client.events)

    talk(body)


@pytest.mark.long
def test_transcripts_and_transcription_sessions(talk: Any, lm: Any) -> None:
    question = noise(0.7, seed=3)
    wanted = lm.generate((question * 32767).astype(np.int16), "A1T1", sample_rate=24_000, max_tokens=512).text.strip()

    async def body(client: Client) -> None:
        await client.send("input_audio_buffer.append", audio=pcm(question))
        await client.send("input_audio_buffer.commit")
        done = await client.until("conversation.item.input_audio_transcription.completed")
        assert done["transcript"] == wanted
        assert done["usage"] == {"type": "duration", "seconds": 0.7}
        assert (await client.send("response.create"))[0]["error"]["code"] == "invalid_session_type"
        kept = (await client.send("conversation.item.retrieve", item_id=done["item_id"]))[0]["item"]
        assert kept["content"] == [{"type": "input_audio", "transcript": wanted, "audio": pcm(question)}]
        check_known(client.events)

    talk(body, given={"type": "transcription", "audio": {"input": {"turn_detection": None}}})


def test_an_answer_is_as_long_as_its_client_allows(talk: Any) -> None:
    async def body(client: Client) -> None:
        for change in ({"output_modalities": ["text"]}, {"output_modalities": ["audio"]}):
            done = await client.ask("who?", max_output_tokens=5, **change)
            assert done["status"] == "incomplete"
            assert done["status_details"] == {"type": "incomplete", "reason": "max_output_tokens"}
            assert done["max_output_tokens"] == 5 and 0 < done["usage"]["output_token_details"]["text_tokens"] <= 5
        await client.send("session.update", session={"max_output_tokens": 4096})
        assert (await client.ask("who?"))["status"] in ("completed", "incomplete")

    talk(body)


@pytest.mark.long
def test_answers_are_freed_as_soon_as_another_one_follows(talk: Any) -> None:
    """Found by the garbage collector alone, they would grow with the square of a conversation, and its pauses with them."""

    async def body(client: Client) -> None:
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

    talk(body)


# --- what clients send in ways of their own ---------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [1, 3, 999, 4801, 65537])
def test_pieces_of_any_size_are_the_same_sound(talk: Any, size: int) -> None:
    sound = base64.b64decode(pcm(noise(0.2 if size < 99 else 2.0)))

    async def body(client: Client) -> None:
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

    talk(body)


@pytest.mark.parametrize("before", ["", "data:audio/pcm;base64,", " DATA:audio/pcm;rate=24000;base64,\r\n"])
@pytest.mark.parametrize("between", ["\n", "\r\n", " \t"])
def test_base64_in_lines_and_of_a_data_url_is_taken(talk: Any, before: str, between: str) -> None:
    sound = pcm(noise(0.3))
    audio = before + between.join(sound[start : start + 76] for start in range(0, len(sound), 76)) + between

    async def body(client: Client) -> None:
        await client.send("input_audio_buffer.append", audio=audio)
        await client.send("input_audio_buffer.commit")
        content = [{"type": "input_audio", "audio": audio}]
        await client.send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
        assert [item.content[0].sound.tobytes() for item in client.session.items] == [base64.b64decode(sound)] * 2

    talk(body)


@pytest.mark.parametrize("form", ["audio/pcm", "audio/pcmu", "audio/pcma"])
def test_what_was_said_can_be_retrieved(talk: Any, form: str) -> None:
    question = noise(0.6, rate=24_000 if form == "audio/pcm" else 8000)
    data = encode(question, form)

    async def body(client: Client) -> None:
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

    talk(body)


def test_what_is_retrieved_is_no_larger_than_clients_take(talk: Any) -> None:
    async def body(client: Client) -> None:
        parts = [{"type": "input_audio", "audio": pcm(np.zeros(24_000)), "transcript": "long"}] * 20
        await client.send("conversation.item.create", item={**written(""), "content": parts})
        (item,) = client.session.items
        (came,) = await client.send("conversation.item.retrieve", item_id=item.id)
        assert came["item"] == item.shown() and len(json.dumps(came)) < 2**20

    talk(body)


@pytest.mark.long
def test_a_response_without_a_question_answers_the_instructions(talk: Any, lm: Any) -> None:
    async def body(client: Client) -> None:
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

    talk(body)


def written(text: str, role: str = "user") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


@pytest.mark.long
@pytest.mark.parametrize("detection", [None, {"type": "server_vad"}, {"type": "semantic_vad"}])
def test_a_committed_sound_without_speech_has_no_answer(talk: Any, detection: Any) -> None:
    silence = np.zeros(24_000) if detection is None else noise(1.0)

    async def body(client: Client) -> None:
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

    talk(body)
