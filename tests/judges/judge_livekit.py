"""Judge: LiveKit's AgentSession over its OpenAI plug-in, without a room: microphone and loudspeaker take no device."""

from __future__ import annotations

import argparse
import asyncio
import time

from devices import RATE, Microphone
from judging import WRITTEN, Conversation, arguments, beside, judge
from livekit import rtc
from livekit.agents import Agent, AgentSession
from livekit.agents.voice import io
from livekit.plugins import openai


class Ear(io.AudioInput):
    """Sound from the microphone."""

    def __init__(self) -> None:
        super().__init__(label="microphone")
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue()

    async def send(self, piece: bytes) -> None:
        self._pieces.put_nowait(piece)

    async def __anext__(self) -> rtc.AudioFrame:
        piece = await self._pieces.get()
        return rtc.AudioFrame(piece, RATE, 1, len(piece) // 2)


class Mouth(io.AudioOutput):
    """Sound to the loudspeaker; a segment ends when all of it was played, or when it is cleared."""

    def __init__(self, conversation: Conversation) -> None:
        super().__init__(label="loudspeaker", capabilities=io.AudioOutputCapabilities(pause=False), sample_rate=RATE)
        self.conversation = conversation
        self.pushed = 0.0  # seconds of the segment
        self.playing: asyncio.Task | None = None

    async def capture_frame(self, frame: rtc.AudioFrame) -> None:
        await super().capture_frame(frame)
        if not self.pushed:
            self.on_playback_started(created_at=time.time())
        self.pushed += frame.duration
        self.conversation.sounded(frame.duration)

    def flush(self) -> None:
        super().flush()
        if self.pushed:
            self.playing = asyncio.create_task(self._play_out())

    def clear_buffer(self) -> None:
        left = self.conversation.loudspeaker.left()
        self.conversation.stopped()
        if self.playing:
            self.playing.cancel()
        if self.pushed:
            self._finish(left)

    async def _play_out(self) -> None:
        await asyncio.sleep(self.conversation.loudspeaker.left())
        self._finish(0.0)

    def _finish(self, left: float) -> None:
        played, self.pushed, self.playing = self.pushed - left, 0.0, None
        self.on_playback_finished(playback_position=played, interrupted=left > 0)


def watch(conversation: Conversation, session: AgentSession) -> None:
    """Report what the session says."""
    session.on("error", lambda event: conversation.failed(event.error))
    session.on("speech_created", lambda event: follow(event.speech_handle))

    @session.on("user_input_transcribed")
    def transcribed(event) -> None:
        if event.is_final:
            conversation.understood(event.transcript)

    @session.on("conversation_item_added")
    def added(event) -> None:
        if event.item.type == "message" and event.item.role == "assistant":
            conversation.wrote(event.item.text_content or "")

    def follow(speech) -> None:
        conversation.began()
        speech.add_done_callback(lambda _: conversation.ended())


async def ask(session: AgentSession) -> None:
    await session.generate_reply(user_input=WRITTEN)


async def converse(conversation: Conversation, options: argparse.Namespace) -> None:
    model = openai.realtime.RealtimeModel(base_url=options.url.replace("ws", "http", 1), api_key=options.key)
    session = AgentSession(llm=model, aec_warmup_duration=None)  # nothing of the loudspeaker reaches the microphone
    watch(conversation, session)
    ear = Ear()
    session.input.audio, session.output.audio = ear, Mouth(conversation)
    await session.start(Agent(instructions="Answer briefly."))
    microphone = Microphone(ear.send)
    async with beside(microphone.run()):
        await conversation.write(ask(session))
        await conversation.hold(microphone.say, options.files)
    messages = session.history.messages()
    conversation.history = [{"role": message.role, "text": message.text_content or ""} for message in messages]
    await session.aclose()


if __name__ == "__main__":
    judge("livekit-agents", converse, arguments(__doc__).parse_args())
