"""Points of asking for an answer: its settings, answers beside the conversation, and cancelling."""

from __future__ import annotations

from tests.realtime.connection import written
from tests.realtime.kit import LONG, SHORT, Kit
from tests.realtime.points import PointFailed, PointSkipped, ServerEvent, Topic, equal, field
from tests.realtime.points_answers import DELTAS, in_order

ASKING = Topic("asking")


@ASKING.point(
    "in-time",
    "an item is told within 5 s, and an answer begins to be within 10 s",
    "clients give their request up after so long",
)
async def in_time(kit: Kit) -> None:
    async with kit.session() as client:
        for seconds, kind, asking in (
            (5, "conversation.item.added", lambda: client.send("conversation.item.create", item=written(SHORT))),
            (10, "response.created", lambda: client.send("response.create")),
        ):
            start = client.now
            await asking()
            told = await client.expect(kind)
            if client.now - start > seconds:
                raise PointFailed(f"{kind} took {client.now - start:.1f} s", told)
        await client.finished(told)


@ASKING.point(
    "override",
    "settings of response.create hold for that answer alone",
    "one written answer on the side would silence all that follow",
)
async def override(kit: Kit) -> None:
    async with kit.session() as client:
        await client.write(SHORT)
        played = await client.respond(output_modalities=["text"], instructions="Answer in one word.")
        equal(played.first("response.content_part.added"), "part.type", "text")
        told = await client.update()
        modalities = field(told, "session.output_modalities", list)
        if "audio" not in modalities:
            raise PointFailed("the session's output_modalities were changed as well", told)


@ASKING.point(
    "limit",
    "max_output_tokens is taken, for the session and for one answer",
    "clients that set one get no answer at all",
)
async def limit(kit: Kit) -> None:
    async with kit.session(max_output_tokens=4096) as client:
        await client.write(SHORT)
        await client.respond()
        await client.write(SHORT)
        await client.respond(max_output_tokens="inf")


@ASKING.point(
    "limited",
    "an answer that max_output_tokens ends is incomplete, and says so",
    "clients take half an answer for a whole one",
)
async def limited(kit: Kit) -> None:
    async with kit.session() as client:
        await client.write(LONG)
        played = await client.respond(max_output_tokens=1)
        equal(played.done, "response.status", "incomplete")
        equal(played.done, "response.status_details.reason", "max_output_tokens")


@ASKING.point(
    "metadata",
    "metadata of response.create comes back in response.created and response.done",
    "clients find their own answer by it, and wait for ever without",
)
async def metadata(kit: Kit) -> None:
    async with kit.session() as client:
        await client.write(SHORT)
        played = await client.respond(metadata={"asked_by": "conformance"})
        for event in (played.created, played.done):
            equal(event, "response.metadata", {"asked_by": "conformance"})


@ASKING.point(
    "beside",
    "an answer with conversation `none` stays out of the conversation",
    "what clients ask on the side, such as a summary, turns up in the dialogue",
)
async def beside(kit: Kit) -> None:
    async with kit.session() as client:
        asked = await client.write(SHORT)
        played = await client.respond(conversation="none", input=[written(LONG)], metadata={"topic": "aside"})
        if field(played.done, "response", dict).get("conversation_id") is not None:
            raise PointFailed("it has a conversation_id", played.done)
        for kind in ("conversation.item.added", "conversation.item.done"):
            if played.of(kind):
                raise PointFailed(f"{kind} came for it", played.first(kind))
        equal(await client.write("One."), "previous_item_id", field(asked, "item.id"))


@ASKING.point(
    "own-input",
    "response.create takes an input of its own, items and references to items of the conversation",
    "clients ask on the side about parts of a conversation",
)
async def own_input(kit: Kit) -> None:
    async with kit.session() as client:
        item_id = field(await client.write("What is one plus one?"), "item.id", str)
        reference = {"type": "item_reference", "id": item_id}
        await client.respond(conversation="none", input=[reference])
        await client.respond(conversation="none", input=[reference, written(SHORT)])


@ASKING.point(
    "text-only",
    'with output_modalities ["text"] an answer is output_text alone',
    "clients with a voice of their own would pay for sound and get no text",
)
async def text_only(kit: Kit) -> None:
    async with kit.session(output_modalities=["text"]) as client:
        await client.write(SHORT)
        played = await client.respond()
        in_order(played.came)
        for kind in ("response.output_audio.delta", "response.output_audio_transcript.delta"):
            if played.of(kind):
                raise PointFailed(f"{kind} came", played.first(kind))
        equal(played.first("response.content_part.added"), "part.type", "text")
        equal(played.done, "response.output.0.content.0.type", "output_text")
        field(played.first("response.output_text.done"), "text", str)


@ASKING.point(
    "cancel",
    "response.cancel ends the answer with the status cancelled, and none of its deltas comes after",
    "a stopped answer goes on talking, or its client waits for its end",
)
async def cancel(kit: Kit) -> None:
    async with kit.session() as client:
        await client.write(LONG)
        await client.send("response.create")
        begun = await client.expect("response.created")
        await client.expect(*DELTAS, "response.done")
        await client.send("response.cancel")
        played = await client.finished(begun)
        if field(played.done, "response.status") == "completed":
            await client.expect("error")
            raise PointSkipped("the answer was over before it could be cancelled", played.done)
        cancelled_by(played.done, "client_cancelled")
        response_id = field(begun, "response.id")
        since = next(n for n, one in enumerate(client.came) if one.event is played.done)
        await client.nothing(
            *DELTAS, since=since, seconds=kit.quiet, where=lambda event: event.get("response_id") == response_id
        )


def cancelled_by(done: ServerEvent, reason: str) -> None:
    """PointFailed where an answer was not cancelled for that reason."""
    equal(done, "response.status", "cancelled")
    equal(done, "response.status_details.reason", reason)
