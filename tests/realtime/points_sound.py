"""Points of sound that comes in and goes out: the input buffer, G.711, transcripts."""

from __future__ import annotations

from tests.realtime.connection import RealtimeClient
from tests.realtime.kit import SHORT, Kit, say
from tests.realtime.points import NEEDS_SPEECH, PointFailed, PointSkipped, ServerEvent, Topic, equal, error_code, field
from tests.realtime.points_items import retrieved
from tests.realtime.sounds import G711_RATE, RATE, SUBTYPES, g711

SOUND = Topic("sound")

TRANSCRIPTION = {"model": "gpt-4o-mini-transcribe"}
WRITTEN_DOWN = "conversation.item.input_audio_transcription"


@SOUND.point(
    "clear",
    "input_audio_buffer.clear empties the buffer, and is told as input_audio_buffer.cleared",
    "sound that a client took back is answered",
)
async def clear(kit: Kit) -> None:
    async with kit.session() as client:
        await client.append(bytes(RATE))
        await client.send("input_audio_buffer.clear")
        await client.expect("input_audio_buffer.cleared")
        await client.send("input_audio_buffer.commit")
        error_code(await client.expect("error", never=("input_audio_buffer.committed",)), "input_audio_buffer_commit_empty")


@SOUND.point(
    "large-append",
    "one append of more than a megabyte is taken (15 MiB are allowed)",
    "clients that send a recording at once lose their connection",
)
async def large_append(kit: Kit) -> None:
    async with kit.session() as client:
        await client.append(bytes(30 * 2 * RATE))
        await client.send("input_audio_buffer.clear")
        await client.expect("input_audio_buffer.cleared")


@SOUND.point(
    "g711-out",
    "an answer in audio/pcmu or audio/pcma has 8000 bytes a second",
    "telephone bridges play noise",
)
async def g711_out(kit: Kit) -> None:
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


@SOUND.point(
    "g711-in",
    "a question in audio/pcmu or audio/pcma is heard at 8000 bytes a second",
    "telephone bridges are not understood",
)
async def g711_in(kit: Kit) -> None:
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


@SOUND.point(
    "transcript",
    "a transcript of the question comes where it is asked for, and carries its usage",
    "typed clients refuse it without usage, and their connection dies",
)
async def transcript(kit: Kit) -> None:
    async with kit.session(audio={"input": {"transcription": TRANSCRIPTION}}) as client:
        told = await written_down(kit, client)
        if field(told, "usage.type") == "duration":
            field(told, "usage.seconds", (int, float))
        else:
            for name in ("input_tokens", "output_tokens", "total_tokens"):
                field(told, f"usage.{name}", int)


@SOUND.point(
    "transcript-kept",
    "an item that was written down has its transcript when it is retrieved",
    "clients ask for the item after its transcript, and show what they get",
)
async def transcript_kept(kit: Kit) -> None:
    async with kit.session(audio={"input": {"transcription": TRANSCRIPTION}}) as client:
        told = await written_down(kit, client)
        equal(await retrieved(client, told["item_id"]), "item.content.0.transcript", told["transcript"])


@SOUND.point(
    "no-transcript",
    "no transcript comes where none was asked for",
    "clients show a line that nobody asked for",
)
async def no_transcript(kit: Kit) -> None:
    for one in (await kit.spoken()).came:
        if str(one.event.get("type")).startswith(WRITTEN_DOWN):
            raise PointFailed("one came", one.event)


@SOUND.point(
    "transcription-session",
    "a session of the type transcription writes down what it hears, and answers nothing",
    "dictation gets answers instead of its text",
)
async def transcription_session(kit: Kit) -> None:
    async with kit.connected("&intent=transcription") as client:
        await client.expect("session.created")
        heard = {"transcription": TRANSCRIPTION, "turn_detection": None}
        await client.send("session.update", session={"type": "transcription", "audio": {"input": heard}})
        equal(await client.expect("session.updated"), "session.type", "transcription")
        since = client.mark
        await written_down(kit, client)
        await client.nothing("response.created", since=since, seconds=kit.quiet)
