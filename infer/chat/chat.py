"""`omni-infer chat`: a spoken conversation in a terminal, with a model that is loaded here or with a Realtime server."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rich.text import Text

from infer.chat.connection import LocalConnection, ServerConnection
from infer.chat.devices import find_device, load_sounddevice, show_devices
from infer.chat.streams import Loudspeaker, MicrophoneInput
from infer.chat.talk import SETTINGS, SpokenChat
from infer.chat.terminal import ChatScreen, interruptions, keys
from infer.loading import cpu_threads, load, warm_up
from infer.options import ChatOptions
from infer.serve.realtime.configuration import Configuration, updated
from infer.serve.realtime.protocol import Event, ProtocolError
from infer.serve.settings import Answering
from omni.errors import SoundWarning, UserError
from omni.generate.question import longest
from omni.utils import hardware

TRANSCRIBER = "whisper-1"  # name of a model that servers know; this project's take any, and transcribe by their own


def chat(options: ChatOptions) -> bool:
    """Talk until the user leaves; returns whether no answer broke. UserError for a bad device, model or server, or a device
    that is gone."""
    sound = load_sounddevice("chat")
    if options.device_in == "list":
        show_devices(sound)
        return True
    settings = session_settings(options)
    source, target = find_device(sound, "input", options.device_in), find_device(sound, "output", options.device_out)
    events: SimpleQueue[Any] = SimpleQueue()
    with ExitStack() as stack:
        microphone = MicrophoneInput(sound, source, events.put)
        stack.callback(microphone.close)
        screen = stack.enter_context(ChatScreen())
        connection, most = connect(options, settings, events.put, screen, stack)
        stack.callback(connection.close)
        connection.send({"type": "session.update", "event_id": SETTINGS, "session": settings})
        folder = None if options.save is None else Path(options.save)
        if folder is not None:
            folder.mkdir(exist_ok=True)
        talk = SpokenChat(
            events,
            connection,
            screen,
            barge_in=options.headphones,
            pressed=options.turn_detection == "none",
            transcribed=options.transcribe,
            longest=most,
            folder=folder,
        )
        loudspeaker = Loudspeaker(sound, target, events.put)
        stack.callback(loudspeaker.close)
        screen.line(Text(f"microphone {source}, loudspeaker {target}\n{welcome(options)}", "dim"))
        stack.enter_context(remarks(events.put))
        stack.enter_context(interruptions(events.put))
        stack.enter_context(keys(events.put, piped=options.turn_detection == "none"))
        return talk.run(microphone, loudspeaker)


def session_settings(options: ChatOptions) -> Event:
    """The settings of the session that the options give; UserError names the field of a bad one."""
    heard: Event = {"transcription": {"model": TRANSCRIBER}} if options.transcribe else {}
    if options.turn_detection != "auto":
        heard["turn_detection"] = detection_of(options.turn_detection)
    settings: Event = {"type": "realtime", "audio": {"input": heard}}
    if options.system:
        settings["instructions"] = options.system
    if options.server is not None and options.adapter is not None:
        settings["audio"]["output"] = {"voice": options.adapter}
    if options.server is not None and options.temperature:
        settings["omni"] = {"temperature": options.temperature}
    try:
        updated(Configuration(), settings, started=False)
    except ProtocolError as error:
        raise UserError(f"--turn_detection or --system: {error}") from None
    return settings


def detection_of(word: str) -> Event | None:
    """A session's turn detection of its type, or JSON of it; None for none."""
    if not word.startswith("{"):
        return None if word == "none" else {"type": word}
    try:
        detection: Event = json.loads(word)
    except ValueError as error:
        raise UserError(f"--turn_detection {word!r} is no JSON ({error})") from None
    return detection


def connect(
    options: ChatOptions, settings: Event, deliver: Callable[[Any], None], screen: ChatScreen, stack: ExitStack
) -> tuple[LocalConnection | ServerConnection, float]:
    """A connection, and the seconds of the longest question; `settings` are completed by what the model can."""
    if options.server is not None:
        screen.doing("connecting")
        return ServerConnection(options.server, deliver), math.inf
    device = hardware.find_device(options.device, options.quantize)
    screen.doing("loading the model")
    lm, keywords = load(options, device, speaks=True)
    stack.enter_context(cpu_threads(options.threads, lm.model))
    screen.doing("warming up")
    warm_up(lm)
    if options.turn_detection == "auto" and lm.config.turn and lm.config.encoder.chunk_samples is not None:
        settings["audio"]["input"]["turn_detection"] = {"type": "semantic_vad"}
    names = ("sampling", "seed", "max_seconds", "text_assist", "context")
    answering = Answering(use_instructions=True, **{name: keywords[name] for name in names})
    beside = {name: keywords[name] for name in ("adapter", "edits", "max_silence")}
    return LocalConnection(lm, answering, beside, deliver), longest(lm.config)


@contextmanager
def remarks(deliver: Callable[[SoundWarning], None]) -> Iterator[None]:
    """Deliver the warnings about sound while the block runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", SoundWarning)
        show = warnings.showwarning

        def show_remark(message: Warning | str, category: type[Warning], *place: Any) -> None:
            if isinstance(message, SoundWarning):
                deliver(message)
            else:
                show(message, category, *place)

        warnings.showwarning = show_remark  # type: ignore[assignment]
        yield


def welcome(options: ChatOptions) -> str:
    """The line of instructions at the start."""
    leave = "Ctrl-C stops an answer, twice (or Ctrl-D) leaves"
    if options.turn_detection == "none":
        return f"Enter begins and ends a question; {leave}"
    if options.headphones:
        return f"speak; you interrupt an answer by speaking, so the microphone must not hear the loudspeaker; {leave}"
    return (
        "speak; while an answer plays you are not heard, because the microphone hears the loudspeaker too (with headphones or "
        f"echo cancellation give --headphones); Enter or {leave}"
    )
