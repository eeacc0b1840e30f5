"""Points of the conversation's items: adding, finding, deleting and cutting them."""

from __future__ import annotations

import base64

from tests.realtime.connection import Played, RealtimeClient, written
from tests.realtime.kit import LONG, SHORT, WORDS, Kit, say
from tests.realtime.points import PointFailed, PointSkipped, ServerEvent, Topic, equal, field
from tests.realtime.sounds import RATE

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


@ITEMS.point(
    "item-ids",
    "an item keeps the id that the client gave it; conversation.item.added and .done tell it",
    "clients wait for their own id and give the item up after some seconds",
)
async def item_ids(kit: Kit) -> None:
    async with kit.session() as client:
        added = await created(client, {**written("One."), "id": "item_of_mine"})
        equal(added, "item.id", "item_of_mine")
        equal(added, "item.role", "user")
        equal(added, "item.content.0.text", "One.")


@ITEMS.point(
    "item-order",
    "previous_item_id: absent for the end, `root` for the beginning, or the id that an item follows",
    "histories that clients rebuild after a reconnect come out of order",
)
async def item_order(kit: Kit) -> None:
    async with kit.session() as client:
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


@ITEMS.point(
    "unknown-previous",
    "an item that is to follow one that is not there gives an error",
    "client and server disagree about the order from then on",
)
async def unknown_previous(kit: Kit) -> None:
    async with kit.session() as client:
        await client.send("conversation.item.create", item=written("One."), previous_item_id="item_of_nobody")
        await client.expect("error", never=("conversation.item.added", "conversation.item.created"))


@ITEMS.point(
    "retrieve",
    "conversation.item.retrieve gives the item with its content",
    "clients ask for items after transcripts and cuts, and wait for them",
)
async def retrieve(kit: Kit) -> None:
    async with kit.session() as client:
        await created(client, {**written("One."), "id": "item_of_mine"})
        found = await retrieved(client, "item_of_mine")
        equal(found, "item.type", "message")
        equal(found, "item.content.0.type", "input_text")
        equal(found, "item.content.0.text", "One.")


@ITEMS.point(
    "retrieve-spoken",
    "a spoken item can be retrieved, and its content has the key transcript",
    "strict clients throw on the missing key, and their connection dies",
)
async def retrieve_spoken(kit: Kit) -> None:
    async with kit.session() as client:
        item_id = field(await say(client, kit.sound.tobytes()), "item.id", str)
        found = await retrieved(client, item_id)
        equal(found, "item.content.0.type", "input_audio")
        field(found, "item.content.0.transcript")


@ITEMS.point(
    "sound-item",
    "an item with the sound of a question is taken, and answered",
    "clients that repeat their history after a reconnect lose what was spoken",
)
async def sound_item(kit: Kit) -> None:
    async with kit.session() as client:
        part = {"type": "input_audio", "audio": base64.b64encode(kit.sound.tobytes()).decode()}
        added = await created(client, {"type": "message", "role": "user", "content": [part]})
        equal(added, "item.content.0.type", "input_audio")
        field(added, "item.content.0.transcript")
        await client.respond()


@ITEMS.point(
    "delete",
    "a deleted item is gone: conversation.item.deleted tells it, and retrieving it fails",
    "clients wait for the deletion, and deleted text still changes answers",
)
async def delete(kit: Kit) -> None:
    async with kit.session() as client:
        await created(client, {**written("One."), "id": "item_of_mine"})
        await client.send("conversation.item.delete", item_id="item_of_mine")
        equal(await client.expect("conversation.item.deleted"), "item_id", "item_of_mine")
        await client.send("conversation.item.retrieve", item_id="item_of_mine")
        await client.expect("error", never=("conversation.item.retrieved",))


@ITEMS.point(
    "delete-answer",
    "an answer can be deleted, and the conversation goes on",
    "clients delete an answer of which nothing was heard",
)
async def delete_answer(kit: Kit) -> None:
    async with kit.session() as client:
        await client.write(SHORT)
        played = await client.respond()
        await client.send("conversation.item.delete", item_id=played.item_id)
        equal(await client.expect("conversation.item.deleted"), "item_id", played.item_id)
        await client.write(SHORT)
        await client.respond()


@ITEMS.point(
    "history",
    "assistants' and systems' items of a client are taken, and a question after them is answered",
    "clients replay their history after a reconnect",
)
async def history(kit: Kit) -> None:
    async with kit.session() as client:
        await created(client, {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "Be brief."}]})
        await created(client, written("What is one plus one?"))
        said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Two."}]}
        added = await created(client, said)
        equal(added, "item.content.0.type", "output_text")
        equal(added, "item.content.0.text", "Two.")
        await client.write(SHORT)
        await client.respond()


@ITEMS.point(
    "function-items",
    "function_call and function_call_output items are taken and kept",
    "clients that replay their history lose its calls, or the session",
)
async def function_items(kit: Kit) -> None:
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


@ITEMS.point(
    "truncate",
    "an answer is cut to what was heard, and its transcript as well",
    "the model goes on as if its listener had heard all that it never played",
)
async def truncate(kit: Kit) -> None:
    async with kit.session() as client:
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


@ITEMS.point(
    "truncate-to-nothing",
    "an answer can be cut to 0 ms",
    "clients do so when nothing of it was played",
)
async def truncate_to_nothing(kit: Kit) -> None:
    async with kit.session() as client:
        played, _ = await heard(client)
        await client.send("conversation.item.truncate", item_id=played.item_id, content_index=0, audio_end_ms=0)
        equal(await client.expect("conversation.item.truncated"), "audio_end_ms", 0)
        found = await retrieved(client, played.item_id)
        if any(part.get("transcript") for part in field(found, "item.content", list)):
            raise PointFailed("it still has a transcript", found)


@ITEMS.point(
    "truncate-cancelled",
    "a cancelled answer can be cut to any part of the sound that was sent",
    "clients cut at every interruption, by what they have played of what they got",
)
async def truncate_cancelled(kit: Kit) -> None:
    for share in (1.0, 0.5):
        async with kit.session() as client:
            await client.write(LONG)
            await client.send("response.create")
            begun = await client.expect("response.created")
            await client.expect("response.output_audio.delta", never=("response.done",))
            await client.send("response.cancel")
            played = await client.finished(begun)
            length = int(share * len(played.sound) * 1000 / (2 * RATE))
            cut = {"item_id": played.item_id, "content_index": 0, "audio_end_ms": length}
            since = client.mark
            await client.send("conversation.item.truncate", **cut)
            equal(await client.expect("conversation.item.truncated", since=since), "audio_end_ms", length)
            await retrieved(client, played.item_id)


@ITEMS.point(
    "truncate-too-far",
    "cutting an answer behind its end gives an error",
    "a client whose clock runs ahead never learns of it",
)
async def truncate_too_far(kit: Kit) -> None:
    async with kit.session() as client:
        played, length = await heard(client)
        cut = {"item_id": played.item_id, "content_index": 0, "audio_end_ms": length + 5000}
        await client.send("conversation.item.truncate", **cut)
        await client.expect("error", never=("conversation.item.truncated",))
