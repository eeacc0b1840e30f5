"""Judge: the OpenAI Agents SDK for Python, with the settings that it comes with. It validates every event of the server."""

from __future__ import annotations

import argparse

from agents.realtime import RealtimeAgent, RealtimeRunner, RealtimeSession
from devices import RATE, Microphone
from judging import Conversation, arguments, beside, judge


async def listen(conversation: Conversation, session: RealtimeSession) -> None:
    async for event in session:
        match event.type:
            case "audio":
                conversation.sounded(len(event.audio.data) / 2 / RATE)
            case "audio_interrupted":
                conversation.stopped()
            case "history_updated":
                conversation.history = [_line(item) for item in event.history if item.type == "message"]
            case "error":
                conversation.failed(event.error)
            case "raw_model_event":
                match event.data.type:
                    case "turn_started":
                        conversation.began()
                    case "turn_ended":
                        conversation.ended()
                    case "transcript_delta":
                        conversation.wrote(event.data.delta)
                    case "input_audio_transcription_completed":
                        conversation.understood(event.data.transcript)
                    case "exception":
                        conversation.failed(f"{event.data.context}: {event.data.exception!r}")
    raise ConnectionError("the server closed the connection")


def _line(item) -> dict[str, str]:
    parts = (getattr(part, "transcript", None) or getattr(part, "text", None) or "" for part in item.content)
    return {"role": item.role, "text": " ".join(parts)}


async def converse(conversation: Conversation, options: argparse.Namespace) -> None:
    runner = RealtimeRunner(RealtimeAgent(name="assistant", instructions="Answer briefly."))
    session = await runner.run(model_config={"url": f"{options.url}/realtime?model=omni", "api_key": options.key})
    async with session:
        microphone = Microphone(session.send_audio)
        async with beside(listen(conversation, session), microphone.run()):
            await conversation.hold(microphone.say, options.files)


if __name__ == "__main__":
    judge("openai-agents", converse, arguments(__doc__).parse_args())
