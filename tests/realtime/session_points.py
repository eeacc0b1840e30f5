"""Points of a session's beginning and configuration, and of errors, after which it lives on."""

from __future__ import annotations

from typing import Any

from tests.realtime.client import RealtimeClient, written
from tests.realtime.kit import LONG, SHORT, Kit
from tests.realtime.points import PointFailed, PointSkipped, ServerEvent, Topic, equal, error_code, field

SESSION = Topic("session")

DETECTION = {"type": "server_vad", "threshold": 0.5, "prefix_padding_ms": 300, "silence_duration_ms": 700}
TOOL = {
    "type": "function",
    "name": "tell_time",
    "description": "Tells the time.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@SESSION.point("clients that configure themselves on session.created wait for ever")
async def created(kit: Kit) -> None:
    """session.created is the first event, and comes unasked."""
    async with kit.connected() as client:
        first = await client.expect()
        if first.get("type") != "session.created":
            raise PointFailed("the first event is another one", first)
        field(first, "session.id", str)
        equal(first, "session.type", "realtime")


@SESSION.point("clients send their configuration and sound at once; what is lost then is the beginning of the first question")
async def early_events(kit: Kit) -> None:
    """Events that come before the client has read anything are taken, sound before session.updated too."""
    async with kit.connected() as client:
        await client.append(bytes(9600))
        await client.send("session.update", session={"type": "realtime", "audio": {"input": {"turn_detection": None}}})
        await client.append(bytes(9600))
        await client.send("conversation.item.create", item=written(SHORT))
        await client.send("response.create")
        for kind in ("session.created", "session.updated", "conversation.item.added"):
            await client.expect(kind)
        await client.answer()


@SESSION.point("clients replace what they know by it, and lose formats, voice or tools that it leaves out")
async def echo(kit: Kit) -> None:
    """session.updated tells the whole configuration in effect, not only what was changed."""
    async with kit.connected() as client:
        told = await client.update(instructions="Answer in one short sentence.")
    for path in (
        "type", "model", "instructions", "output_modalities", "max_output_tokens", "tools", "tool_choice",
        "audio.input.format.type", "audio.input.turn_detection", "audio.output.format.type", "audio.output.voice",
    ):  # fmt: skip
        field(told, f"session.{path}")
    equal(told, "session.instructions", "Answer in one short sentence.")


@SESSION.point("an update of one setting silently resets the others")
async def update_parts(kit: Kit) -> None:
    """An update changes only the fields that it names."""
    async with kit.connected() as client:
        before = await client.update(
            instructions="Be brief.", audio={"input": {"turn_detection": {**DETECTION, "create_response": False}}}
        )
        equal(before, "session.instructions", "Be brief.")
        after = await client.update(max_output_tokens=1234)
        equal(after, "session.max_output_tokens", 1234)
        same_but(before, after, ("max_output_tokens", "expires_at"))
        last = await client.update(audio={"input": {"transcription": {"model": "whisper-1"}}})
        field(last, "session.audio.input.transcription", dict)
        for path in ("session.audio.input.turn_detection", "session.audio.output", "session.instructions"):
            equal(last, path, field(after, path))


def same_but(before: ServerEvent, after: ServerEvent, changed: tuple[str, ...]) -> None:
    """PointFailed where two configurations differ in other fields than those."""
    was, now = (field(event, "session", dict) for event in (before, after))
    for name in {**was, **now}:
        if name not in changed and was.get(name) != now.get(name):
            raise PointFailed(f"session.{name} was changed as well", after)


@SESSION.point("clients that see no interrupt_response cancel and truncate by themselves, beside the server")
async def detection_echo(kit: Kit) -> None:
    """Turn detection is told with create_response and interrupt_response spelled out."""
    for given in ({"type": "server_vad"}, {"type": "server_vad", "interrupt_response": False}):
        async with kit.connected() as client:
            told = await client.update(audio={"input": {"turn_detection": given}})
        equal(told, "session.audio.input.turn_detection.type", "server_vad")
        field(told, "session.audio.input.turn_detection.create_response", bool)
        equal(told, "session.audio.input.turn_detection.interrupt_response", given.get("interrupt_response", True))


@SESSION.point("push-to-talk clients have their turns ended by the server")
async def detection_off(kit: Kit) -> None:
    """turn_detection null turns it off, and is told as null."""
    async with kit.connected() as client:
        told = await client.update(audio={"input": {"turn_detection": None}})
    equal(told, "session.audio.input.turn_detection", None)


@SESSION.point("it is what agent frameworks ask for by default; their first update is refused")
async def semantic_vad(kit: Kit) -> None:
    """Turn detection of the type semantic_vad is taken, with its eagerness."""
    async with kit.connected() as client:
        told = await client.update(audio={"input": {"turn_detection": {"type": "semantic_vad", "eagerness": "low"}}})
    equal(told, "session.audio.input.turn_detection.type", "semantic_vad")
    equal(told, "session.audio.input.turn_detection.eagerness", "low")
    equal(told, "session.audio.input.turn_detection.interrupt_response", True)


@SESSION.point(
    "clients take 24 kHz for granted: another rate is heard too fast or too slow, and typed clients refuse the event"
)
async def rate(kit: Kit) -> None:
    """Audio/pcm is told with its rate, 24000."""
    async with kit.connected() as client:
        first = await client.expect("session.created")
        pcm = {"format": {"type": "audio/pcm", "rate": 24000}}
        told = await client.update(audio={"input": pcm, "output": pcm})
    for event in (first, told):
        for way in ("input", "output"):
            equal(event, f"session.audio.{way}.format.type", "audio/pcm")
            equal(event, f"session.audio.{way}.format.rate", 24000)


async def taken(kit: Kit, **session: Any) -> ServerEvent:
    """`session.updated` after settings that change nothing that must be; the session lives on."""
    async with kit.connected() as client:
        told = await client.update(**session)
        await client.update(instructions="Be brief.")
    return told


@SESSION.point("clients send all of them in their first update, and leave when it is refused")
async def harmless_settings(kit: Kit) -> None:
    """noise_reduction, tracing, speed, truncation and include are taken, whatever they do."""
    for noise in ({"type": "near_field"}, None):
        await taken(
            kit,
            audio={"input": {"noise_reduction": noise}, "output": {"speed": 1.0}},
            tracing="auto",
            truncation="auto",
            include=["item.input_audio_transcription.logprobs"],
        )


@SESSION.point("clients have names of their own built in, and cannot connect where these are refused")
async def unknown_names(kit: Kit) -> None:
    """Names of models, voices and transcription models that it does not have are taken."""
    told = await taken(
        kit,
        model="gpt-realtime",
        audio={
            "input": {"transcription": {"model": "gpt-4o-mini-transcribe", "language": "en"}},
            "output": {"voice": "marin"},
        },
    )
    field(told, "session.audio.output.voice")


@SESSION.point("clients send both, empty or not, with every update")
async def tools(kit: Kit) -> None:
    """Tools and tool_choice are taken and told."""
    await taken(kit, tools=[], tool_choice="auto")
    told = await taken(kit, tools=[TOOL], tool_choice={"type": "function", "name": "tell_time"})
    equal(told, "session.tools.0.name", "tell_time")
    field(told, "session.tool_choice")


@SESSION.point("browsers cannot send headers, and close a connection that selects none of their subprotocols")
async def subprotocol(kit: Kit) -> None:
    """Of a browser's subprotocols `realtime` is selected, and the key is taken from openai-insecure-api-key.KEY."""
    async with kit.connected(browser=True) as client:
        first = await client.expect("session.created")
        if client.socket.subprotocol != "realtime":
            raise PointFailed(f"the subprotocol {client.socket.subprotocol!r} was selected", first)


ERRORS = Topic("errors")


async def lives(client: RealtimeClient) -> None:
    """PointFailed where the session does nothing any more."""
    await client.update(instructions="Be brief.")


@ERRORS.in_session("a client that is newer than the server loses its session")
async def unknown_event(client: RealtimeClient) -> None:
    """An event of an unknown type gives an error, and the session lives on."""
    await client.send("conversation.item.fold")
    told = await client.expect("error")
    field(told, "error.message", str)
    field(told, "error.type", str)
    await lives(client)


@ERRORS.in_session("one broken message ends a conversation")
async def bad_json(client: RealtimeClient) -> None:
    """A message that is no JSON gives an error, and the session lives on."""
    for text in ("{", "[]"):
        await client.send_text(text)
        await client.expect("error")
    await lives(client)


@ERRORS.in_session("one broken message ends a conversation")
async def bad_sound(client: RealtimeClient) -> None:
    """Sound that is no base64 gives an error, and the session lives on."""
    await client.send("input_audio_buffer.append", audio="*")
    await client.expect("error")
    await lives(client)


@ERRORS.in_session("clients cannot tell which of their requests failed, and wait for it until they give up")
async def error_event_id(client: RealtimeClient) -> None:
    """error.event_id is the id of the client's event that was wrong."""
    for number, kind in enumerate(("conversation.item.fold", "response.cancel", "input_audio_buffer.commit")):
        await client.send(kind, event_id=f"mine_{number}")
        equal(await client.expect("error"), "error.event_id", f"mine_{number}")


@ERRORS.in_session("client and server disagree about the configuration from then on", instructions="Be brief.")
async def refused_update(client: RealtimeClient) -> None:
    """An update with a bad value gives an error and changes nothing."""
    given = {"type": "realtime", "instructions": "Be long.", "output_modalities": ["smell"]}
    await client.send("session.update", session=given)
    await client.expect("error", never=("session.updated",))
    told = await client.update()
    equal(told, "session.instructions", "Be brief.")


async def idle_cancel(kit: Kit) -> ServerEvent:
    """The error of `response.cancel` where nothing is under way."""
    async with kit.session() as client:
        await client.send("response.cancel")
        return await client.expect("error")


@ERRORS.point("clients cancel as a matter of course, let this code pass, and take any other for the end of the session")
async def cancel_code(kit: Kit) -> None:
    """response.cancel without an answer gives response_cancel_not_active."""
    error_code(await idle_cancel(kit), "response_cancel_not_active")


@ERRORS.point("some clients compare the message, not the code, and report an error to their user")
async def cancel_message(kit: Kit) -> None:
    """The message of that error begins with `Cancellation failed`."""
    told = await idle_cancel(kit)
    if not field(told, "error.message", str).startswith("Cancellation failed"):
        raise PointFailed("error.message begins otherwise", told)


@ERRORS.in_session("clients let this code pass; two answers at once, or another code, break their turn")
async def second_response(client: RealtimeClient) -> None:
    """response.create while an answer is under way gives conversation_already_has_active_response."""
    await client.write(LONG)
    await client.send("response.create", event_id="first")
    await client.send("response.create", event_id="second")
    told = await client.expect("error", "response.done", patient=True)
    begun = [one.event for one in client.came if one.event.get("type") == "response.created"]
    if len(begun) > 1:
        raise PointFailed("a second answer was begun", begun[1])
    if told.get("type") == "response.done":
        raise PointSkipped("the answer was over before the second one was asked for", told)
    error_code(told, "conversation_already_has_active_response")
    equal(told, "error.event_id", "second")
    first = begun[0] if begun else await client.expect("response.created")
    await client.send("response.cancel")
    await client.finished(first)


@ERRORS.in_session("clients commit at every release of a key, and let only this code pass")
async def empty_commit(client: RealtimeClient) -> None:
    """Committing an empty buffer gives input_audio_buffer_commit_empty."""
    await client.send("input_audio_buffer.commit")
    error_code(await client.expect("error", never=("input_audio_buffer.committed",)), "input_audio_buffer_commit_empty")
    await lives(client)


@ERRORS.in_session("clients that repeat their history after a reconnect let only this code pass")
async def duplicate_item(client: RealtimeClient) -> None:
    """An item with an id that is taken gives item_create_duplicate_item_id."""
    item = {**written("One."), "id": "item_of_mine"}
    await client.send("conversation.item.create", item=item)
    await client.expect("conversation.item.added")
    await client.send("conversation.item.create", item=item)
    told = await client.expect("error", never=("conversation.item.added", "conversation.item.created"))
    error_code(told, "item_create_duplicate_item_id")


@ERRORS.in_session("it is the one code of a retrieval that clients let pass; another one ends their session")
async def unknown_item(client: RealtimeClient) -> None:
    """Retrieving an item that is not there gives item_retrieve_invalid_item_id."""
    await client.send("conversation.item.retrieve", item_id="item_of_nobody")
    error_code(await client.expect("error", never=("conversation.item.retrieved",)), "item_retrieve_invalid_item_id")
    await lives(client)
