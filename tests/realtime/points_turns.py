"""Points of turns that the server ends by voice activity, and of interruptions."""

from __future__ import annotations

from typing import Any

from tests.realtime.connection import RealtimeClient
from tests.realtime.kit import LONG, Kit
from tests.realtime.points import PointFailed, PointSkipped, ServerEvent, Topic, equal, field
from tests.realtime.points_answers import DELTAS, in_order
from tests.realtime.points_asking import cancelled_by
from tests.realtime.sounds import Microphone, without_silence

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


@TURNS.point(
    "vad-turn",
    "a spoken turn: speech_started, speech_stopped, committed, its item, all of one item_id, then the answer",
    "clients show who speaks, and tie transcripts to turns, by these events",
    speech=True,
)
async def vad_turn(kit: Kit) -> None:
    async with kit.session(SERVER_VAD) as client, Microphone(client) as microphone:
        microphone.say(kit.sound)
        await heard_turn(client)
        in_order((await client.answer()).came)


@TURNS.point(
    "semantic-turn",
    "a turn that semantic_vad ends has the same events, and is answered",
    "it is what agent frameworks ask for by default",
    speech=True,
)
async def semantic_turn(kit: Kit) -> None:
    detection = {"type": "semantic_vad", "eagerness": "high"}
    async with kit.session(detection) as client, Microphone(client) as microphone:
        microphone.say(kit.sound)
        await heard_turn(client)
        await client.answer()


@TURNS.point(
    "no-answer",
    "with create_response false a turn is committed and not answered until the client asks",
    "clients that look at a question first get two answers",
    speech=True,
)
async def no_answer(kit: Kit) -> None:
    async with kit.session({**SERVER_VAD, "create_response": False}) as client, Microphone(client) as microphone:
        microphone.say(kit.sound)
        since = client.mark
        await heard_turn(client)
        await client.nothing("response.created", since=since, seconds=kit.quiet)
        await client.respond()


async def begun(client: RealtimeClient) -> ServerEvent:
    """`response.created` of a long answer whose sound has begun."""
    await client.write(LONG)
    await client.send("response.create")
    created = await client.expect("response.created")
    await client.expect("response.output_audio.delta", never=("response.done",))
    return created


@TURNS.point(
    "interruption",
    "speech ends the answer within a second: response.done is cancelled by turn_detected, and no delta comes after",
    "the answer talks over its listener",
    speech=True,
)
async def interruption(kit: Kit) -> None:
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


@TURNS.point(
    "after-interruption",
    "the turn that interrupted is committed and answered",
    "what a listener says into an answer is lost",
    speech=True,
)
async def after_interruption(kit: Kit) -> None:
    async with kit.session(SERVER_VAD) as client, Microphone(client) as microphone:
        await begun(client)
        microphone.say(without_silence(kit.sound))
        started = await client.expect(HEARD[0])
        committed = await client.expect(HEARD[2])
        equal(committed, "item_id", field(started, "item_id"))
        await client.answer()


@TURNS.point(
    "no-interruption",
    "with interrupt_response false the answer goes on under speech",
    "clients that interrupt by themselves lose the answer at every noise",
    speech=True,
)
async def no_interruption(kit: Kit) -> None:
    detection = {**SERVER_VAD, "interrupt_response": False, "create_response": False}
    async with kit.session(detection) as client, Microphone(client) as microphone:
        created = await begun(client)
        microphone.say(without_silence(kit.sound))
        played = await client.finished(created)
        if not any(one.event.get("type") == HEARD[0] for one in client.came):
            raise PointSkipped("the answer was over before speech was heard", played.done)
        if field(played.done, "response.status") == "cancelled":
            raise PointFailed("it was cancelled", played.done)
