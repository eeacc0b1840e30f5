"""A conversation by microphone and loudspeaker, as a client of a Realtime session: one loop over blocks of sound, the server's
events, and keys.

    listening -- speech_started --> hearing -- committed --> thinking -- first sound --> speaking -- all was heard --> ...
                                       ^                        |                           |
                                       +-- speech_started ------+-- with headphones also ---+

The session finds the questions, or Enter does; what an answer's listener has heard is told by what the loudspeaker has played.
Blocks of the microphone come all the time, also while nobody speaks: captions and the end of playing are looked at with each.
"""

from __future__ import annotations

import base64
import math
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infer.chat.connection import LocalConnection, ServerConnection
from infer.chat.streams import Loudspeaker, MicrophoneBlock, MicrophoneInput, SoundStream
from infer.chat.terminal import ChatScreen, Key
from infer.options import in_options, on_one_line
from infer.pcm import PCM_RATE
from infer.serve.realtime.protocol import Event
from omni.audio.wav import write_audio
from omni.errors import SoundWarning, UserError

GONE = 5.0  # seconds after which a device that gives or takes no sound is taken for gone
ECHO = 0.3  # seconds for which the room is not heard after an answer was, where the microphone hears the loudspeaker
DEAD = 3.0  # seconds of zeros after which the microphone is said to be muted
SHORTEST = 0.1  # seconds of the shortest question that a server takes
SPARE = 0.5  # seconds of the longest question that are left to the model, as the server leaves them

SETTINGS = "settings"  # id of the event that sets the session up
HARMLESS = ("response_cancel_not_active", "item_truncate_invalid_item_id")
"""Codes of errors about an answer that has ended by itself meanwhile."""


@dataclass
class PlayedAnswer:
    """The answer that is waited for, or heard."""

    number: int
    response: str = ""  # ids of its response and its item, once they are known
    item: str = ""
    asked: float = field(default_factory=time.monotonic)
    first: float | None = None  # seconds from there to its first sound
    texts: deque[tuple[str, float]] = field(default_factory=deque)  # that are not shown yet, and their seconds
    pieces: list[np.ndarray] = field(default_factory=list)  # its sound so far, [S] each, int16 at 24 kHz
    over: bool = False  # all of it has come
    cut: bool = False  # it was ended at its limit

    @property
    def seconds(self) -> float:
        return sum(map(len, self.pieces)) / PCM_RATE


class SpokenChat:
    """Listens, asks and plays until it is left.

    Args:
        events: of the microphone, the session and the keys, in the order in which they came.
        barge_in: listen while an answer is heard.
        pressed: a key begins and ends questions.
        transcribed: transcripts of questions are shown.
        longest: seconds of the longest question, where that is known.
        folder: gets `question-1.wav`, `answer-1.wav`, ..., and the conversation.
    """

    def __init__(
        self,
        events: queue.SimpleQueue[Any],
        connection: LocalConnection | ServerConnection,
        screen: ChatScreen,
        *,
        barge_in: bool,
        pressed: bool,
        transcribed: bool = False,
        longest: float = math.inf,
        folder: Path | None = None,
    ) -> None:
        self._events, self._connection, self._screen, self._folder = events, connection, screen, folder
        self._barge_in, self._pressed, self._transcribed = barge_in, pressed, transcribed
        self._longest = max(longest - SPARE, longest / 2)
        self._microphone: MicrophoneInput
        self._loudspeaker: Loudspeaker
        self._hearing = False  # a question is being spoken, which began at a millisecond of the input
        self._began = 0
        self._seconds = 0.0  # length of the last one
        self._answer: PlayedAnswer | None = None
        self._count = 0  # questions so far
        self._items: dict[str, int] = {}  # numbers of questions, by their items
        self._echo = 0  # samples of the microphone that are still to be passed over
        self._deaf = False  # some were
        self._still, self._played = 0, -1.0  # samples since what was played last changed, and what that was
        self._zeros: int | None = 0  # samples of nothing but zeros since the start; None once there was another
        self.whole = True

    # --- the loop -----------------------------------------------------------------------------------------------------

    def run(self, microphone: MicrophoneInput, loudspeaker: Loudspeaker) -> bool:
        """Talk until the input ends; returns whether no answer broke. UserError where a device or the session is gone."""
        self._microphone, self._loudspeaker = microphone, loudspeaker
        try:
            microphone.start()
            self._listen()
            while (event := self._events.get(timeout=GONE)) != "end":
                self._take(event)
        except queue.Empty:
            raise microphone.lost_error() from None
        finally:
            self._leave()
        return self.whole

    def _take(self, event: Any) -> None:
        if isinstance(event, MicrophoneBlock):
            self._hear(event)
        elif isinstance(event, dict):
            if (handler := HANDLERS.get(event["type"])) is not None:
                handler(self, event)
        elif isinstance(event, SoundWarning):  # a reason to doubt a question
            self._screen.tell(f"warning: {on_one_line(str(event))}")
        elif isinstance(event, SoundStream):
            raise event.lost_error()
        elif isinstance(event, Exception):
            raise event
        else:
            self._press(event)

    def _send(self, event_type: str, **fields: Any) -> None:
        self._connection.send({"type": event_type, **fields})

    def _leave(self) -> None:
        """End what is under way; the history and the folder keep what was heard."""
        try:
            self._drop_question()
            self._stop_answer("left")
        finally:
            self._connection.close(None if self._folder is None else self._folder / "conversation.safetensors")

    # --- the microphone -----------------------------------------------------------------------------------------------

    def _hear(self, block: MicrophoneBlock) -> None:
        """Take a block of the microphone, and pass it on where it is to be heard."""
        samples = self._microphone.samples(block.raw)
        if block.lost:
            self._screen.tell("warning: sound of the microphone was lost: this machine is too busy to take it in time")
        self._look_for_zeros(samples)
        if not self._pressed:
            self._pass_on(samples)
        elif self._hearing:
            left = (self._longest - self._seconds) * PCM_RATE  # infinite where a server has not told its longest
            asked = samples[: round(min(left, len(samples)))]
            self._send_sound(asked)
            self._seconds += len(asked) / PCM_RATE
            if self._seconds >= self._longest:
                self._end_question()
        self._look_at_answer(len(samples))

    def _pass_on(self, samples: np.ndarray) -> None:
        """Pass samples on, but those in which the microphone hears the loudspeaker: no question goes on across them."""
        if self._answer is not None and self._answer.pieces and not self._barge_in:
            self._echo = round(ECHO * PCM_RATE)
        if self._echo > 0:
            self._echo, self._deaf = self._echo - len(samples), True
            return
        if self._deaf:
            self._deaf = False
            self._send("input_audio_buffer.clear")
        self._send_sound(samples)

    def _send_sound(self, samples: np.ndarray) -> None:
        self._send("input_audio_buffer.append", audio=base64.b64encode(samples.astype("<i2").tobytes()).decode())

    def _look_for_zeros(self, samples: np.ndarray) -> None:
        if self._zeros is None:
            return
        self._zeros = None if samples.any() else self._zeros + len(samples)
        if self._zeros is not None and self._zeros >= DEAD * PCM_RATE:
            self._zeros = None
            self._screen.tell(
                f"warning: the microphone {self._microphone.device} gives nothing but zeros; is it muted, or is this "
                "terminal not allowed to hear it? (--device_in list)"
            )

    # --- the question -------------------------------------------------------------------------------------------------

    def _speech(self, event: Event) -> None:
        """A question begins or ends."""
        if "audio_end_ms" in event:
            self._hearing, self._seconds = False, (event["audio_end_ms"] - self._began) / 1000
            return
        self._stop_answer("interrupted")
        self._hearing, self._began = True, event["audio_start_ms"]
        self._screen.doing("hearing you")

    def _committed(self, event: Event) -> None:
        """A question is whole."""
        self._count += 1
        self._answer = PlayedAnswer(self._count)
        self._loudspeaker.begin()
        self._still, self._played = 0, -1.0
        if self._folder is not None:
            self._items[event["item_id"]] = self._count
            self._send("conversation.item.retrieve", item_id=event["item_id"])
        if not self._transcribed:
            self._screen.you(f"({self._seconds:.1f} s)")
        if self._seconds >= self._longest:
            self._screen.tell(f"warning: the question was cut after {self._seconds:.1f} s, the longest that the model takes")
        self._screen.doing("thinking")

    def _retrieved(self, event: Event) -> None:
        item = event["item"]
        sound = "".join(part.get("audio") or "" for part in item["content"])
        number = self._items.pop(item["id"])
        if self._folder is not None and sound:
            write_sound(self._folder / f"question-{number}.wav", [np.frombuffer(base64.b64decode(sound), "<i2")])
        elif self._folder is not None:
            self._screen.tell(f"warning: question {number} is not saved: the server gives no sound of that length back")

    def _end_question(self) -> None:
        """Ask what came between two presses, where that is enough."""
        self._hearing = False
        if self._seconds < SHORTEST:
            self._listen()
            return
        self._send("input_audio_buffer.commit")
        self._send("response.create")

    def _drop_question(self) -> None:
        if self._hearing:
            self._hearing = False
            self._send("input_audio_buffer.clear")

    def _listen(self) -> None:
        self._screen.doing("waiting" if self._pressed else "listening", "Enter begins a question" if self._pressed else "")

    # --- the answer ---------------------------------------------------------------------------------------------------

    def _created(self, event: Event) -> None:
        if self._answer is not None and not self._answer.response:
            self._answer.response = event["response"]["id"]
        else:  # its question was dropped meanwhile
            self._send("response.cancel", response_id=event["response"]["id"])

    def _output(self, event: Event) -> None:
        """A part of an answer comes: its item, text or sound; that of one that nobody hears any more is dropped."""
        answer = self._answer
        if answer is None or answer.response != event["response_id"]:
            return
        if "item" in event:
            answer.item = event["item"]["id"]
        elif event["type"] == "response.output_audio.delta":
            if answer.first is None:
                answer.first = time.monotonic() - answer.asked
            answer.pieces.append(np.frombuffer(base64.b64decode(event["delta"]), "<i2"))
            self._loudspeaker.write(answer.pieces[-1].astype(np.float32) / 32768)
        else:
            answer.texts.append((event["delta"], answer.seconds))

    def _done(self, event: Event) -> None:
        response, answer = event["response"], self._answer
        if answer is None or answer.response != response["id"]:
            return
        answer.over, answer.cut = True, response["status"] == "incomplete"
        self._loudspeaker.end()
        if response["status"] != "failed":
            return
        error = response["status_details"]["error"]
        self._loudspeaker.stop()
        self._answer = None
        self._screen.answered("(broken off)")
        if error.get("code") == "no_speech":
            self._screen.tell(f"warning: {error['message']}")
        else:
            self.whole = False
            self._screen.tell(f"error: {in_options(error.get('message', ''))}")
        self._listen()

    def _failed(self, event: Event) -> None:
        """An event of this client, or the session, has failed."""
        error = event["error"]
        if error.get("event_id") == SETTINGS:
            raise UserError(error["message"])
        if error.get("code") not in HARMLESS:
            self._screen.tell(f"error: {in_options(error['message'])}")

    def _look_at_answer(self, passed: int) -> None:
        """Show what is spoken by now, and see whether all was heard; `passed` samples of the microphone came meanwhile."""
        answer = self._answer
        if answer is None:
            return
        played = self._loudspeaker.played
        if answer.pieces:
            way = "speak to interrupt" if self._barge_in else "Enter or Ctrl-C stops it"
            self._screen.doing("speaking", f"{played:.1f} s; {way}")
        while answer.texts and answer.pieces and answer.texts[0][1] <= played:
            self._screen.show(answer.texts.popleft()[0])
        if answer.over and not self._loudspeaker.waits:
            for text, _ in answer.texts:
                self._screen.show(text)
            first = "" if answer.first is None else f", first audio {answer.first * 1e3:.0f} ms"
            self._finish_answer(answer, None, f"({played:.1f} s{first})")
            if answer.cut:
                self._screen.tell("the answer was cut at a limit: --max_seconds, or context (--config)")
            self._listen()
        elif answer.pieces:
            self._still = 0 if played != self._played else self._still + passed
            self._played = played
            if self._still >= GONE * PCM_RATE and self._loudspeaker.waits:
                raise self._loudspeaker.lost_error()

    def _finish_answer(self, answer: PlayedAnswer, played: float | None, note: str) -> None:
        """Note an answer that is over; `played` is how much of it was heard, where that was not all."""
        self._answer = None
        if self._folder is not None:
            write_sound(self._folder / f"answer-{answer.number}.wav", answer.pieces, played)
        self._screen.answered(note)

    def _stop_answer(self, reason: str) -> None:
        """Silence the answer that is waited for or heard, and cut the history to what was heard."""
        answer = self._answer
        if answer is None:
            return
        played = self._loudspeaker.stop()
        if answer.response and not answer.over and reason != "interrupted":  # the server has seen that itself
            self._send("response.cancel", response_id=answer.response)
        if answer.item:
            self._send(
                "conversation.item.truncate", item_id=answer.item, content_index=0, audio_end_ms=int(played * 1000 + 1e-6)
            )
        self._finish_answer(answer, played, f"({reason} after {played:.1f} s)" if played else f"({reason})")

    # --- keys ---------------------------------------------------------------------------------------------------------

    def _press(self, key: Key) -> None:
        """Take a key: Enter begins or ends a question, or stops the answer; Ctrl-C drops or stops either."""
        if key == "interrupt":
            self._drop_question()
            self._stop_answer("stopped")
            self._screen.tell("Ctrl-C again, or Ctrl-D, leaves")
            self._listen()
        elif self._pressed and self._hearing:
            self._end_question()
        elif self._pressed:
            self._stop_answer("stopped")
            self._send("input_audio_buffer.clear")
            self._hearing, self._seconds = True, 0.0
            self._screen.doing("hearing you", "Enter ends it")
        elif self._answer is not None:
            self._stop_answer("stopped")
            self._listen()


HANDLERS: dict[str, Callable[[SpokenChat, Event], None]] = {
    "input_audio_buffer.speech_started": SpokenChat._speech,
    "input_audio_buffer.speech_stopped": SpokenChat._speech,
    "input_audio_buffer.committed": SpokenChat._committed,
    "conversation.item.retrieved": SpokenChat._retrieved,
    "conversation.item.input_audio_transcription.completed": lambda chat, event: chat._screen.you(event["transcript"].strip()),
    "conversation.item.input_audio_transcription.failed": lambda chat, event: chat._screen.tell(
        f"warning: no transcript: {in_options(event['error'].get('message', ''))}"
    ),
    "response.created": SpokenChat._created,
    "response.output_item.added": SpokenChat._output,
    "response.output_text.delta": SpokenChat._output,
    "response.output_audio_transcript.delta": SpokenChat._output,
    "response.output_audio.delta": SpokenChat._output,
    "response.done": SpokenChat._done,
    "error": SpokenChat._failed,
    "omni.ducked": lambda chat, event: chat._loudspeaker.duck(event["active"]),
}
"""Handlers of the server's events, by type."""


def write_sound(file: Path, pieces: Sequence[np.ndarray], seconds: float | None = None) -> None:
    """Write samples [S] each, int16 at `PCM_RATE`, of an answer as far as it was heard; no file where there are none."""
    sound = np.concatenate([np.zeros(0, np.int16), *pieces])
    sound = sound if seconds is None else sound[: round(seconds * PCM_RATE)]
    if len(sound):
        write_audio(file, torch.from_numpy(sound.astype(np.float32) / 32768), PCM_RATE)
