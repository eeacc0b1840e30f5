"""`omni-infer chat`: a spoken conversation in a terminal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any, cast

import numpy as np

from infer.chat.devices import find_device, load_sounddevice, show_devices
from infer.chat.questions import PressedQuestions, QuestionFinder, VoiceQuestions
from infer.chat.streams import Loudspeaker, MicrophoneInput
from infer.chat.talk import ChatFolder, Lost, MicrophoneBlock, SpokenChat
from infer.chat.terminal import ChatScreen, interruptions, keys
from infer.loading import cpu_threads, load, warm_up
from infer.options import ChatOptions
from infer.pcm import PCM_RATE
from infer.turns.detector import PADDING, Eagerness, SemanticVad, ServerVad
from infer.turns.vad import Silero
from omni.errors import UserError
from omni.generate.question import longest
from omni.generate.speech_lm import SpeechLM
from omni.utils import hardware

TRANSCRIPT_TOKENS = 512  # most tokens of a transcript


def chat(options: ChatOptions) -> bool:
    """Talk until the user leaves; returns whether no answer broke. UserError for a bad device or model, or a device that is
    gone."""
    sound = load_sounddevice("chat")
    if options.list_devices:
        show_devices(sound)
        return True
    source, target = find_device(sound, "input", options.device_in), find_device(sound, "output", options.device_out)
    device = hardware.find_device(options.device, options.quantize)
    events: SimpleQueue[Any] = SimpleQueue()
    with ExitStack() as stack:
        microphone = MicrophoneInput(
            sound, source, lambda *block: events.put(MicrophoneBlock(*block)), lambda: events.put(Lost("input"))
        )
        stack.callback(microphone.close)
        screen = stack.enter_context(ChatScreen())
        screen.doing("loading the model")
        lm, keywords = load(options, device, speaks=True)
        stack.enter_context(cpu_threads(options.threads, lm.model))
        session = stack.enter_context(lm.session(**keywords))
        eagerness = eagerness_of(options, lm)
        talk = SpokenChat(
            events,
            session,
            question_finder(options, longest(lm.config), eagerness),
            screen,
            judged=eagerness is not None,
            barge_in=options.headphones,
            pressed=options.push_to_talk,
            transcribe=transcriber(lm, {name: keywords[name] for name in ("adapter", "edits")}) if options.transcribe else None,
            folder=None if options.save is None else ChatFolder(options.save),
        )
        loudspeaker = Loudspeaker(sound, target, session.sample_rate, lambda: events.put(Lost("output")))
        stack.callback(loudspeaker.close)
        screen.doing("warming up")
        warm_up(lm)
        screen.line(f"microphone {source}, loudspeaker {target}")
        screen.line(welcome(options))
        stack.enter_context(interruptions(events.put))
        stack.enter_context(keys(events.put, piped=options.push_to_talk))
        return talk.run(microphone, loudspeaker)


def eagerness_of(options: ChatOptions, lm: SpeechLM) -> Eagerness | None:
    """The eagerness of the model's turn head; None where a key or silence ends questions. UserError where the option asks for
    a turn head and the model has none."""
    judges = lm.config.turn and lm.config.encoder.chunk_samples is not None
    if options.push_to_talk or options.eagerness == "silence" or (options.eagerness == "auto" and not judges):
        return None
    if not judges:
        raise UserError(
            f"--eagerness {options.eagerness} is for a model with a turn head that hears in chunks, and {options.model} is "
            "none; leave it out, or train one with model.turn"
        )
    return cast(Eagerness, options.eagerness)


def question_finder(options: ChatOptions, most: float, eagerness: Eagerness | None) -> QuestionFinder:
    """Finds questions by key or voice activity, each of at most `most` seconds."""
    if options.push_to_talk:
        return PressedQuestions(most)
    settings: ServerVad | SemanticVad = ServerVad(threshold=options.threshold, silence_duration_ms=options.silence_duration_ms)
    if eagerness is not None:
        settings = SemanticVad(eagerness=eagerness)
    return VoiceQuestions(Silero(), settings, PADDING, most)


def transcriber(lm: SpeechLM, beside: dict[str, Any]) -> Callable[[np.ndarray], str]:
    """Writes down a question [S], beside the conversation; `beside`: keywords of what acts beside the model."""

    def transcribe(question: np.ndarray) -> str:
        answer = lm.generate(question, "A1T1", sample_rate=PCM_RATE, max_tokens=TRANSCRIPT_TOKENS, **beside)
        if answer.error is not None:
            raise UserError(answer.error)
        return answer.text

    return transcribe


def welcome(options: ChatOptions) -> str:
    """The line of instructions at the start."""
    leave = "Ctrl-C stops an answer, twice (or Ctrl-D) leaves"
    if options.push_to_talk:
        return f"Enter begins and ends a question; {leave}"
    if options.headphones:
        return f"speak; you interrupt an answer by speaking, so the microphone must not hear the loudspeaker; {leave}"
    return (
        "speak; while an answer plays you are not heard, because the microphone hears the loudspeaker too (with headphones or "
        f"echo cancellation give --headphones); Enter or {leave}"
    )
