"""Judge: the OpenAI library, with which the application stops its loudspeaker itself, and truncates what was not heard."""

from __future__ import annotations

import argparse
import asyncio
import base64

from devices import RATE, Microphone, in_time
from judging import Conversation, arguments, beside, judge
from openai import AsyncOpenAI


class Caller:
    """One connection and the items that it saw."""

    def __init__(self, conversation: Conversation, connection) -> None:
        self.conversation, self.connection = conversation, connection
        self.items: dict[str, asyncio.Future] = {}
        self.item = ""  # that sounds, or sounded last
        self.seconds = 0.0  # of it
        self.active = False
        self.ready = asyncio.Event()

    async def send(self, sound: bytes) -> None:
        await self.connection.input_audio_buffer.append(audio=base64.b64encode(sound).decode())

    async def press_and_say(self, sound: bytes) -> None:
        """Ask without the server's detection of turns: stop the answer that still sounds, send, commit, and want an answer."""
        if self.active:
            await self.connection.response.cancel()
        await self.stop()
        async for piece in in_time(sound):
            await self.send(piece)
        await self.connection.input_audio_buffer.commit()
        await self.connection.response.create()

    async def stop(self) -> None:
        """Stop the loudspeaker, and tell the server what was heard."""
        if left := self.conversation.loudspeaker.left():
            self.conversation.stopped()
            heard = int(1000 * (self.seconds - left))
            await self.connection.conversation.item.truncate(item_id=self.item, content_index=0, audio_end_ms=heard)

    async def listen(self) -> None:
        talk = self.conversation
        async for event in self.connection:
            match event.type:
                case "session.updated":
                    self.ready.set()
                case "input_audio_buffer.speech_started":
                    await self.stop()
                case "response.created":
                    self.active = True
                    talk.began()
                case "response.output_audio.delta":
                    if event.item_id != self.item:
                        self.item, self.seconds = event.item_id, 0.0
                    seconds = len(base64.b64decode(event.delta)) / 2 / RATE
                    self.seconds += seconds
                    talk.sounded(seconds)
                case "response.output_audio_transcript.delta":
                    talk.wrote(event.delta)
                case "response.done":
                    self.active = False
                    talk.ended()
                case "conversation.item.added":
                    self.items[event.item.id] = asyncio.get_running_loop().create_future()
                case "conversation.item.retrieved":
                    self.items[event.item.id].set_result(event.item)
                case "conversation.item.input_audio_transcription.completed":
                    talk.understood(event.transcript)
                case "error":
                    talk.failed(event.error.to_json())
        raise ConnectionError("the server closed the connection")

    async def recall(self) -> None:
        """Ask for every item as the server has it now."""
        for item, kept in self.items.items():
            await self.connection.conversation.item.retrieve(item_id=item)
            kept = await asyncio.wait_for(kept, 5)
            text = " ".join(part.transcript or part.text or "" for part in kept.content)
            self.conversation.history.append({"role": kept.role, "text": text})


async def converse(conversation: Conversation, options: argparse.Namespace) -> None:
    conversation.client += f", {options.turns}"
    client = AsyncOpenAI(api_key=options.key, base_url=options.url.replace("ws", "http", 1))
    async with client.realtime.connect(model="omni") as connection:
        caller = Caller(conversation, connection)
        async with beside(caller.listen()):
            detection = {"type": options.turns} if options.turns != "manual" else None
            sound = {"transcription": {"model": "whisper-1"}, "turn_detection": detection}
            await connection.session.update(session={"type": "realtime", "audio": {"input": sound}})
            await asyncio.wait_for(caller.ready.wait(), 10)
            if detection:
                microphone = Microphone(caller.send)
                async with beside(microphone.run()):
                    await conversation.hold(microphone.say, options.files)
            else:
                await conversation.hold(caller.press_and_say, options.files)
            await caller.recall()


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--turns", choices=("server_vad", "semantic_vad", "manual"), default="server_vad")
    judge("openai", converse, parser.parse_args())
