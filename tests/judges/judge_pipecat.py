"""Judge: Pipecat's service of the Realtime API in a pipeline with its aggregators; microphone and loudspeaker take no device.

As in Pipecat's own example, a written message and a wish for an answer precede the questions. (Without them Pipecat 1.14 wants
an answer to the first question itself, beside the one that the server gives.)
"""

from __future__ import annotations

import argparse
import asyncio

from devices import RATE, Microphone
from judging import WRITTEN, Conversation, arguments, beside, judge
from loguru import logger
from pipecat.frames import frames
from pipecat.observers.base_observer import BaseObserver, FramePushed
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.services.openai.realtime import events
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.transports.base_output import BaseOutputTransport
from pipecat.transports.base_transport import TransportParams
from pipecat.workers.runner import WorkerRunner


class Loudspeaker(BaseOutputTransport):
    """Takes as long to play a frame as it lasts."""

    async def start(self, frame: frames.StartFrame) -> None:
        await super().start(frame)
        await self.set_transport_ready(frame)

    async def write_audio_frame(self, frame: frames.OutputAudioRawFrame) -> bool:
        await asyncio.sleep(frame.num_frames / frame.sample_rate)
        return True


class Watcher(BaseObserver):
    """Reports what the service and the loudspeaker say."""

    def __init__(self, conversation: Conversation) -> None:
        super().__init__(observe_every_push=False)
        self.conversation, self.speaking = conversation, False

    async def on_push_frame(self, data: FramePushed) -> None:
        talk = self.conversation
        match data.frame:
            case frames.LLMFullResponseStartFrame():
                talk.began()
            case frames.TTSAudioRawFrame() if isinstance(data.source, OpenAIRealtimeLLMService):
                talk.sounded(data.frame.num_frames / RATE, played=True)
            case frames.TTSTextFrame():
                talk.wrote(data.frame.text)
            case frames.TranscriptionFrame():
                talk.understood(data.frame.text)
            case frames.BotStartedSpeakingFrame():
                self.speaking = True
            case frames.InterruptionFrame() if self.speaking:
                talk.interrupted()
            case frames.BotStoppedSpeakingFrame():
                self.speaking = False
                talk.ended()


async def converse(conversation: Conversation, options: argparse.Namespace) -> None:
    logger.remove()
    logger.add(conversation.failed, level="ERROR", format="{message}")
    detection = events.TurnDetection() if options.turns == "server_vad" else events.SemanticTurnDetection()
    sound = events.AudioInput(transcription=events.InputAudioTranscription(), turn_detection=detection)
    service = OpenAIRealtimeLLMService(
        api_key=options.key,
        base_url=f"{options.url}/realtime",
        settings=OpenAIRealtimeLLMService.Settings(
            system_instruction="Answer briefly.",
            session_properties=events.SessionProperties(audio=events.AudioConfiguration(input=sound)),
        ),
    )
    context = LLMContext([{"role": "user", "content": WRITTEN}])
    user, assistant = LLMContextAggregatorPair(context)
    worker = PipelineWorker(
        Pipeline([user, service, Loudspeaker(TransportParams(audio_out_enabled=True)), assistant]),
        params=PipelineParams(audio_in_sample_rate=RATE, audio_out_sample_rate=RATE),
        observers=[Watcher(conversation)],
    )
    started = asyncio.Event()
    worker.add_event_handler("on_pipeline_started", lambda *_: started.set())
    worker.add_event_handler("on_pipeline_error", lambda _, frame: conversation.failed(frame.error))

    async def send(piece: bytes) -> None:
        await worker.queue_frame(frames.InputAudioRawFrame(audio=piece, sample_rate=RATE, num_channels=1))

    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    microphone = Microphone(send)
    async with beside(runner.run()):
        await started.wait()
        async with beside(microphone.run()):
            await conversation.write(worker.queue_frame(frames.LLMRunFrame()))
            await conversation.hold(microphone.say, options.files)
        await worker.cancel()
    conversation.history = [{"role": message["role"], "text": str(message["content"])} for message in context.messages]


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--turns", choices=("server_vad", "semantic_vad"), default="semantic_vad")
    judge("pipecat-ai", converse, parser.parse_args())
