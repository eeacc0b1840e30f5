"""Points of items, of sound that comes in and goes out, and of turns that the server ends by voice activity."""

from __future__ import annotations

import base64
from typing import Any

from tests.realtime.answer_points import DELTAS, cancelled_by, in_order
from tests.realtime.client import G711_RATE, RATE, SUBTYPES, Microphone, Played, RealtimeClient, g711, without_silence, written
from tests.realtime.kit import SHORT, WORDS, Kit, begun, say
from tests.realtime.points import NEEDS_SPEECH, PointFailed, PointSkipped, ServerEvent, Topic, equal, error_code, field

ITEMS = Topic("items")


async def created(client: RealtimeClient, item: ServerEvent, **values: str) -> ServerEvent:
    """`conversation.item.added` of an item that is created; `conversation.item.done` has come too."""
    await client.send("conversation.item.create", item=item, **values)
    added = await client.expect("conversation.item.added")
    item_id = field(added, "item.id", str)
    await client.expect("conversation.item.done", where=lambda event: field(event, "item.id") == item_id)
    return added


async def retrieved(client: RealtimeClient, item_id: str) -> ServerEvent:
    await client.send("conversation.item.retrieve", item_id=item_id)
    found = await client.expect("conversation.item.retrieved")
    equal(found, "item.id", item_id)
    return found


@ITEMS.in_session("clients wait for their own id and give the item up after some seconds")
async def item_ids(client: RealtimeClient) -> None:
    """An item keeps the id that the client gave it; conversation.item.added and .done tell it."""
    added = await created(client, {**written("One."), "id": "item_of_mine"})
    equal(added, "item.id", "item_of_mine")
    equal(added, "item.role", "user")
    equal(added, "item.content.0.text", "One.")


@ITEMS.in_session("histories that clients rebuild after a reconnect come out of order")
async def item_order(client: RealtimeClient) -> None:
    """previous_item_id: absent for the end, `root` for the beginning, or the id that an item follows."""
    for name, given, told in (
        ("one", {}, None),
        ("three", {}, "one"),
        ("zero", {"previous_item_id": "root"}, None),
        ("two", {"previous_item_id": "one"}, "one"),
        ("four", {}, "three"),
    ):
        added = await created(client, {**written(name), "id": name}, **given)
        if added.get("previous_item_id") != told:
            raise PointFailed(f"previous_item_id of item {name!r} is not {told!r}", added)


@ITEMS.in_session("client and server disagree about the order from then on")
async def unknown_previous(client: RealtimeClient) -> None:
    """An item that is to follow one that is not there gives an error."""
    await client.send("conversation.item.create", item=written("One."), previous_item_id="item_of_nobody")
    await client.expect("error", never=("conversation.item.added", "conversation.item.created"))


@ITEMS.in_session("clients ask for items after transcripts and cuts, and wait for them")
async def retrieve(client: RealtimeClient) -> None:
    """conversation.item.retrieve gives the item with its content."""
    await created(client, {**written("One."), "id": "item_of_mine"})
    found = await retrieved(client, "item_of_mine")
    equal(found, "item.type", "message")
    equal(found, "item.content.0.type", "input_text")
    equal(found, "item.content.0.text", "One.")


@ITEMS.point("strict clients throw on the missing key, and their connection dies")
async def retrieve_spoken(kit: Kit) -> None:
    """A spoken item can be retrieved, and its content has the key transcript."""
    async with kit.session() as client:
        item_id = field(await say(client, kit.sound.tobytes()), "item.id", str)
        found = await retrieved(client, item_id)
        equal(found, "item.content.0.type", "input_audio")
        field(found, "item.content.0.transcript")


@ITEMS.point("clients that repeat their history after a reconnect lose what was spoken")
async def sound_item(kit: Kit) -> None:
    """An item with the sound of a question is taken, and answered."""
    async with kit.session() as client:
        part = {"type": "input_audio", "audio": base64.b64encode(kit.sound.tobytes()).decode()}
        added = await created(client, {"type": "message", "role": "user", "content": [part]})
        equal(added, "item.content.0.type", "input_audio")
        field(added, "item.content.0.transcript")
        await client.respond()


@ITEMS.in_session("clients wait for the deletion, and deleted text still changes answers")
async def delete(client: RealtimeClient) -> None:
    """A deleted item is gone: conversation.item.deleted tells it, and retrieving it fails."""
    await created(client, {**written("One."), "id": "item_of_mine"})
    await client.send("conversation.item.delete", item_id="item_of_mine")
    equal(await client.expect("conversation.item.deleted"), "item_id", "item_of_mine")
    await client.send("conversation.item.retrieve", item_id="item_of_mine")
    await client.expect("error", never=("conversation.item.retrieved",))


@ITEMS.in_session("clients delete an answer of which nothing was heard")
async def delete_answer(client: RealtimeClient) -> None:
    """An answer can be deleted, and the conversation goes on."""
    await client.write(SHORT)
    played = await client.respond()
    await client.send("conversation.item.delete", item_id=played.item_id)
    equal(await client.expect("conversation.item.deleted"), "item_id", played.item_id)
    await client.write(SHORT)
    await client.respond()


@ITEMS.in_session("clients replay their history after a reconnect")
async def history(client: RealtimeClient) -> None:
    """Assistants' and systems' items of a client are taken, and a question after them is answered."""
    await created(client, written("Be brief.", "system"))
    await created(client, written("What is one plus one?"))
    added = await created(client, written("Two.", "assistant", "output_text"))
    equal(added, "item.content.0.type", "output_text")
    equal(added, "item.content.0.text", "Two.")
    await client.write(SHORT)
    await client.respond()


@ITEMS.point("clients that replay their history lose its calls, or the session")
async def function_items(kit: Kit) -> None:
    """function_call and function_call_output items are taken and kept."""
    call = {"call_id": "call_1", "name": "tell_time", "arguments": '{"city": "Rome"}'}
    async with kit.session() as client:
        await created(client, {"type": "function_call", "id": "item_call", **call})
        await created(client, {"type": "function_call_output", "id": "item_output", "call_id": "call_1", "output": "noon"})
        found = await retrieved(client, "item_call")
        for name, value in call.items():
            equal(found, f"item.{name}", value)
        found = await retrieved(client, "item_output")
        equal(found, "item.call_id", "call_1")
        equal(found, "item.output", "noon")


async def heard(client: RealtimeClient) -> tuple[Played, int]:
    """A spoken answer of several words, and its length in milliseconds."""
    await client.write(WORDS)
    played = await client.respond()
    if not played.sound:
        raise PointSkipped("the answer has no sound", played.done)
    return played, len(played.sound) * 1000 // (2 * RATE)


@ITEMS.in_session("the model goes on as if its listener had heard all that it never played")
async def truncate(client: RealtimeClient) -> None:
    """An answer is cut to what was heard, and its transcript as well."""
    played, length = await heard(client)
    cut = {"item_id": played.item_id, "content_index": 0, "audio_end_ms": length // 5}
    await client.send("conversation.item.truncate", **cut)
    told = await client.expect("conversation.item.truncated")
    for name, value in cut.items():
        equal(told, name, value)
    found = await retrieved(client, played.item_id)
    whole = played.joined("response.output_audio_transcript.delta").strip()
    if len(whole.split()) < 2:
        raise PointSkipped("the answer has fewer than two words", played.done)
    rest = " ".join(part.get("transcript") or "" for part in field(found, "item.content", list)).strip()
    if rest == whole:
        raise PointFailed("the transcript is still whole", found)


@ITEMS.in_session("clients do so when nothing of it was played")
async def truncate_to_nothing(client: RealtimeClient) -> None:
    """An answer can be cut to 0 ms."""
    played, _ = await heard(client)
    await client.send("conversation.item.truncate", item_id=played.item_id, content_index=0, audio_end_ms=0)
    equal(await client.expect("conversation.item.truncated"), "audio_end_ms", 0)
    found = await retrieved(client, played.item_id)
    if any(part.get("transcript") for part in field(found, "item.content", list)):
        raise PointFailed("it still has a transcript", found)


@ITEMS.point("clients cut at every interruption, by what they have played of what they got")
async def truncate_cancelled(kit: Kit) -> None:
    """A cancelled answer can be cut to any part of the sound that was sent."""
    for share in (1.0, 0.5):
        async with kit.session() as client:
            created = await begun(client)
            await client.send("response.cancel")
            played = await client.finished(created)
            length = int(share * len(played.sound) * 1000 / (2 * RATE))
            cut = {"item_id": played.item_id, "content_index": 0, "audio_end_ms": length}
            since = client.mark
            await client.send("conversation.item.truncate", **cut)
            equal(await client.expect("conversation.item.truncated", since=since), "audio_end_ms", length)
            await retrieved(client, played.item_id)


@ITEMS.in_session("a client whose clock runs ahead never learns of it")
async def truncate_too_far(client: RealtimeClient) -> None:
    """Cutting an answer behind its end gives an error."""
    played, length = await heard(client)
    cut = {"item_id": played.item_id, "content_index": 0, "audio_end_ms": length + 5000}
    await client.send("conversation.item.truncate", **cut)
    await client.expect("error", never=("conversation.item.truncated",))


SOUND = Topic("sound")

TRANSCRIPTION = {"model": "gpt-4o-mini-transcribe"}
WRITTEN_DOWN = "conversation.item.input_audio_transcription"


@SOUND.in_session("sound that a client took back is answered")
async def clear(client: RealtimeClient) -> None:
    """input_audio_buffer.clear empties the buffer, and is told as input_audio_buffer.cleared."""
    await client.append(bytes(RATE))
    await client.send("input_audio_buffer.clear")
    await client.expect("input_audio_buffer.cleared")
    await client.send("input_audio_buffer.commit")
    error_code(await client.expect("error", never=("input_audio_buffer.committed",)), "input_audio_buffer_commit_empty")


@SOUND.in_session("clients that send a recording at once lose their connection")
async def large_append(client: RealtimeClient) -> None:
    """One append of more than a megabyte is taken (15 MiB are allowed)."""
    await client.append(bytes(30 * 2 * RATE))
    await client.send("input_audio_buffer.clear")
    await client.expect("input_audio_buffer.cleared")


@SOUND.point("telephone bridges play noise")
async def g711_out(kit: Kit) -> None:
    """An answer in audio/pcmu or audio/pcma has 8000 bytes a second."""
    plain = len((await kit.written()).answer.sound) / (2 * RATE)
    for form in SUBTYPES:
        async with kit.session(audio={"output": {"format": {"type": form}}}) as client:
            told = await client.update()
            equal(told, "session.audio.output.format.type", form)
            await client.write(SHORT)
            played = await client.respond()
            seconds = len(played.sound) / G711_RATE
            if not seconds or not plain:
                raise PointSkipped("the answer has no sound", played.done)
            if not 0.2 < seconds / plain < 5:
                raise PointFailed(f"{form} has {seconds:.1f} s, where audio/pcm had {plain:.1f} s", played.done)
            cut = {"item_id": played.item_id, "content_index": 0, "audio_end_ms": int(seconds * 1000)}
            await client.send("conversation.item.truncate", **cut)
            await client.expect("conversation.item.truncated")


@SOUND.point("telephone bridges are not understood")
async def g711_in(kit: Kit) -> None:
    """A question in audio/pcmu or audio/pcma is heard at 8000 bytes a second."""
    for form in SUBTYPES:
        audio = {"input": {"format": {"type": form}, "transcription": TRANSCRIPTION}}
        async with kit.session(audio=audio) as client:
            item_id = field(await say(client, g711(kit.sound, form)), "item.id", str)
            told = await client.expect(f"{WRITTEN_DOWN}.completed", f"{WRITTEN_DOWN}.failed")
            usage = told.get("usage") or {}
            seconds = len(kit.sound) / RATE
            if usage.get("type") == "duration" and abs(field(told, "usage.seconds", (int, float)) - seconds) > 0.1 * seconds:
                raise PointFailed(f"{form}: it heard another length than {seconds:.2f} s", told)
            equal(told, "item_id", item_id)


async def written_down(kit: Kit, client: RealtimeClient) -> ServerEvent:
    """`….completed` of the transcript of the question, which is said now."""
    item_id = field(await say(client, kit.sound.tobytes()), "item.id", str)
    told = await client.expect(f"{WRITTEN_DOWN}.completed", f"{WRITTEN_DOWN}.failed")
    if told.get("type") == f"{WRITTEN_DOWN}.failed":
        if not kit.has_speech:
            raise PointSkipped(NEEDS_SPEECH, told)
        raise PointFailed("it could not be written down", told)
    equal(told, "item_id", item_id)
    equal(told, "content_index", 0)
    field(told, "transcript", str)
    return told


@SOUND.point("typed clients refuse it without usage, and their connection dies")
async def transcript(kit: Kit) -> None:
    """A transcript of the question comes where it is asked for, and carries its usage."""
    async with kit.session(audio={"input": {"transcription": TRANSCRIPTION}}) as client:
        told = await written_down(kit, client)
        if field(told, "usage.type") == "duration":
            field(told, "usage.seconds", (int, float))
        else:
            for name in ("input_tokens", "output_tokens", "total_tokens"):
                field(told, f"usage.{name}", int)


@SOUND.point("clients ask for the item after its transcript, and show what they get")
async def transcript_kept(kit: Kit) -> None:
    """An item that was written down has its transcript when it is retrieved."""
    async with kit.session(audio={"input": {"transcription": TRANSCRIPTION}}) as client:
        told = await written_down(kit, client)
        equal(await retrieved(client, told["item_id"]), "item.content.0.transcript", told["transcript"])


@SOUND.point("clients show a line that nobody asked for")
async def no_transcript(kit: Kit) -> None:
    """No transcript comes where none was asked for."""
    for one in (await kit.spoken()).came:
        if str(one.event.get("type")).startswith(WRITTEN_DOWN):
            raise PointFailed("one came", one.event)


@SOUND.point("dictation gets answers instead of its text")
async def transcription_session(kit: Kit) -> None:
    """A session of the type transcription writes down what it hears, and answers nothing."""
    async with kit.connected("&intent=transcription") as client:
        await client.expect("session.created")
        heard = {"transcription": TRANSCRIPTION, "turn_detection": None}
        await client.send("session.update", session={"type": "transcription", "audio": {"input": heard}})
        equal(await client.expect("session.updated"), "session.type", "transcription")
        since = client.mark
        await written_down(kit, client)
        await client.nothing("response.created", since=since, seconds=kit.quiet)


TURNS = Topic("turns")

SERVER_VAD: dict[str, Any] = {"type": "server_vad", "silence_duration_ms": 500}

LATEST_STOP = 1.0
"""Seconds from speech_started to the end of the answer that it interrupts."""

HEARD = ("input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped", "input_audio_buffer.committed")


async def heard_turn(client: RealtimeClient) -> ServerEvent:
    """The events of one turn that is being spoken, up to its item's `conversation.item.added`, which is returned."""
    started, stopped, committed = [await client.expect(kind) for kind in HEARD]
    item_id = field(started, "item_id", str)
    for event in (stopped, committed):
        equal(event, "item_id", item_id)
    if not field(started, "audio_start_ms", int) < field(stopped, "audio_end_ms", int):
        raise PointFailed(f"speech that began at {started['audio_start_ms']} ms ended before", stopped)
    added = await client.expect("conversation.item.added", never=("response.output_item.added",))
    equal(added, "item.id", item_id)
    equal(added, "item.role", "user")
    return added


@TURNS.point("clients show who speaks, and tie transcripts to turns, by these events", speech=True)
async def vad_turn(kit: Kit) -> None:
    """A spoken turn: speech_started, speech_stopped, committed, its item, all of one item_id, then the answer."""
    async with kit.session(SERVER_VAD) as client, Microphone(client) as microphone:
        microphone.say(kit.sound)
        await heard_turn(client)
        in_order((await client.answer()).came)


@TURNS.point("it is what agent frameworks ask for by default", speech=True)
async def semantic_turn(kit: Kit) -> None:
    """A turn that semantic_vad ends has the same events, and is answered."""
    detection = {"type": "semantic_vad", "eagerness": "high"}
    async with kit.session(detection) as client, Microphone(client) as microphone:
        microphone.say(kit.sound)
        await heard_turn(client)
        await client.answer()


@TURNS.point("clients that look at a question first get two answers", speech=True)
async def no_answer(kit: Kit) -> None:
    """With create_response false a turn is committed and not answered until the client asks."""
    async with kit.session({**SERVER_VAD, "create_response": False}) as client, Microphone(client) as microphone:
        microphone.say(kit.sound)
        since = client.mark
        await heard_turn(client)
        await client.nothing("response.created", since=since, seconds=kit.quiet)
        await client.respond()


@TURNS.point("the answer talks over its listener", speech=True)
async def interruption(kit: Kit) -> None:
    """Speech ends the answer within a second: response.done is cancelled by turn_detected, and no delta comes after."""
    async with kit.session(SERVER_VAD) as client, Microphone(client) as microphone:
        created = await begun(client)
        microphone.say(without_silence(kit.sound))
        await client.expect(HEARD[0])
        played = await client.finished(created)
        started = next(one for one in client.came if one.event.get("type") == HEARD[0])
        ended = played.came[-1]
        if ended.at < started.at:
            raise PointSkipped("the answer was over before speech was heard", played.done)
        cancelled_by(played.done, "turn_detected")
        late = ended.at - started.at
        if late > LATEST_STOP:
            raise PointFailed(f"it ended {late:.1f} s after speech_started", played.done)
        response_id = field(created, "response.id")
        await client.nothing(
            *DELTAS,
            since=client.came.index(ended),
            seconds=kit.quiet,
            where=lambda event: event.get("response_id") == response_id,
        )


@TURNS.point("what a listener says into an answer is lost", speech=True)
async def after_interruption(kit: Kit) -> None:
    """The turn that interrupted is committed and answered."""
    async with kit.session(SERVER_VAD) as client, Microphone(client) as microphone:
        await begun(client)
        microphone.say(without_silence(kit.sound))
        started = await client.expect(HEARD[0])
        committed = await client.expect(HEARD[2])
        equal(committed, "item_id", field(started, "item_id"))
        await client.answer()


@TURNS.point("clients that interrupt by themselves lose the answer at every noise", speech=True)
async def no_interruption(kit: Kit) -> None:
    """With interrupt_response false the answer goes on under speech."""
    detection = {**SERVER_VAD, "interrupt_response": False, "create_response": False}
    async with kit.session(detection) as client, Microphone(client) as microphone:
        created = await begun(client)
        microphone.say(without_silence(kit.sound))
        played = await client.finished(created)
        if not any(one.event.get("type") == HEARD[0] for one in client.came):
            raise PointSkipped("the answer was over before speech was heard", played.done)
        if field(played.done, "response.status") == "cancelled":
            raise PointFailed("it was cancelled", played.done)
