"""Points of errors: what they name, which codes clients compare, and that a session lives on after them."""

from __future__ import annotations

from tests.realtime.connection import RealtimeClient, written
from tests.realtime.kit import LONG, Kit
from tests.realtime.points import PointFailed, PointSkipped, ServerEvent, Topic, equal, error_code, field

ERRORS = Topic("errors")


async def lives(client: RealtimeClient) -> None:
    """PointFailed where the session does nothing any more."""
    await client.update(instructions="Be brief.")


@ERRORS.point(
    "unknown-event",
    "an event of an unknown type gives an error, and the session lives on",
    "a client that is newer than the server loses its session",
)
async def unknown_event(kit: Kit) -> None:
    async with kit.session() as client:
        await client.send("conversation.item.fold")
        told = await client.expect("error")
        field(told, "error.message", str)
        field(told, "error.type", str)
        await lives(client)


@ERRORS.point(
    "bad-json",
    "a message that is no JSON gives an error, and the session lives on",
    "one broken message ends a conversation",
)
async def bad_json(kit: Kit) -> None:
    async with kit.session() as client:
        for text in ("{", "[]"):
            await client.send_text(text)
            await client.expect("error")
        await lives(client)


@ERRORS.point(
    "bad-sound",
    "sound that is no base64 gives an error, and the session lives on",
    "one broken message ends a conversation",
)
async def bad_sound(kit: Kit) -> None:
    async with kit.session() as client:
        await client.send("input_audio_buffer.append", audio="*")
        await client.expect("error")
        await lives(client)


@ERRORS.point(
    "error-event-id",
    "error.event_id is the id of the client's event that was wrong",
    "clients cannot tell which of their requests failed, and wait for it until they give up",
)
async def error_event_id(kit: Kit) -> None:
    async with kit.session() as client:
        for number, kind in enumerate(("conversation.item.fold", "response.cancel", "input_audio_buffer.commit")):
            await client.send(kind, event_id=f"mine_{number}")
            equal(await client.expect("error"), "error.event_id", f"mine_{number}")


@ERRORS.point(
    "refused-update",
    "an update with a bad value gives an error and changes nothing",
    "client and server disagree about the configuration from then on",
)
async def refused_update(kit: Kit) -> None:
    async with kit.session(instructions="Be brief.") as client:
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


@ERRORS.point(
    "cancel-code",
    "response.cancel without an answer gives response_cancel_not_active",
    "clients cancel as a matter of course, let this code pass, and take any other for the end of the session",
)
async def cancel_code(kit: Kit) -> None:
    error_code(await idle_cancel(kit), "response_cancel_not_active")


@ERRORS.point(
    "cancel-message",
    "the message of that error begins with `Cancellation failed`",
    "some clients compare the message, not the code, and report an error to their user",
)
async def cancel_message(kit: Kit) -> None:
    told = await idle_cancel(kit)
    if not field(told, "error.message", str).startswith("Cancellation failed"):
        raise PointFailed("error.message begins otherwise", told)


@ERRORS.point(
    "second-response",
    "response.create while an answer is under way gives conversation_already_has_active_response",
    "clients let this code pass; two answers at once, or another code, break their turn",
)
async def second_response(kit: Kit) -> None:
    async with kit.session() as client:
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


@ERRORS.point(
    "empty-commit",
    "committing an empty buffer gives input_audio_buffer_commit_empty",
    "clients commit at every release of a key, and let only this code pass",
)
async def empty_commit(kit: Kit) -> None:
    async with kit.session() as client:
        await client.send("input_audio_buffer.commit")
        error_code(await client.expect("error", never=("input_audio_buffer.committed",)), "input_audio_buffer_commit_empty")
        await lives(client)


@ERRORS.point(
    "duplicate-item",
    "an item with an id that is taken gives item_create_duplicate_item_id",
    "clients that repeat their history after a reconnect let only this code pass",
)
async def duplicate_item(kit: Kit) -> None:
    async with kit.session() as client:
        item = {**written("One."), "id": "item_of_mine"}
        await client.send("conversation.item.create", item=item)
        await client.expect("conversation.item.added")
        await client.send("conversation.item.create", item=item)
        told = await client.expect("error", never=("conversation.item.added", "conversation.item.created"))
        error_code(told, "item_create_duplicate_item_id")


@ERRORS.point(
    "unknown-item",
    "retrieving an item that is not there gives item_retrieve_invalid_item_id",
    "it is the one code of a retrieval that clients let pass; another one ends their session",
)
async def unknown_item(kit: Kit) -> None:
    async with kit.session() as client:
        await client.send("conversation.item.retrieve", item_id="item_of_nobody")
        error_code(await client.expect("error", never=("conversation.item.retrieved",)), "item_retrieve_invalid_item_id")
        await lives(client)
