"""A conversation by microphone and loudspeaker: one loop over blocks of sound, events of answers, and keys.

    listening -- a question begins --> hearing -- it ends --> thinking -- first sound --> speaking -- all was heard --> ...
                                          ^                      |                           |
                                          +-- speech ------------+-- with headphones also ---+

Blocks of the microphone come all the time, also while nobody speaks: captions and the end of playing are looked at with each.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from infer.chat.devices import NAMES, OPTIONS, Kind, SoundDevice, all_devices, listing
from infer.chat.questions import (
    Answered,
    Asker,
    Failed,
    QuestionFinder,
    QuestionPart,
    Remarked,
    SpokenTurn,
    Transcribed,
    Transcriber,
)
from infer.chat.streams import Loudspeaker, MicrophoneInput
from infer.chat.terminal import ChatScreen, Key
from infer.options import in_options, on_one_line
from infer.pcm import PCM_RATE
from omni.audio.wav import write_audio
from omni.errors import UserError
from omni.generate.results import AudioChunk, Ended, TextDelta
from omni.generate.session import Session

GONE = 5.0  # seconds after which a device that gives or takes no sound is taken for gone
ECHO = 0.3  # seconds for which the room is not heard after an answer was, where the microphone hears the loudspeaker

REASONS = {
    "length": "the answer was cut at the limit; see --max_seconds",
    "silence": "the answer was ended by its silence; see --max_silence",
    "cache": "the answer was cut: the conversation fills the model's context; see --context",
}
"""Notes on an answer that the model did not end, by the reason of its end."""

DEAD = 3.0  # seconds of zeros after which the microphone is said to be muted

CONVERSATION = "conversation.safetensors"


class MicrophoneBlock(NamedTuple):
    """A block of the microphone; `lost`: some before it was not taken in time."""

    raw: np.ndarray
    lost: bool


class Lost(NamedTuple):
    """A device is gone."""

    kind: Kind


@dataclass
class PlayedAnswer:
    """The answer that is waited for, or heard."""

    turn: SpokenTurn
    texts: deque[tuple[str, float | None]] = field(default_factory=deque)  # that are not shown yet, and their seconds
    chunks: list[Tensor] = field(default_factory=list)  # its sound so far, [S] each
    ended: Ended | None = None  # its last event, once it came


class SpokenChat:
    """Listens, asks and plays until it is left.

    Args:
        events: of the microphone, the answers and the keys, in the order in which they came.
        barge_in: listen while an answer is heard.
        pressed, judged: a key begins and ends questions; the model's turn head ends them.
        transcribe: returns the transcript of a question [S]; None to show none.
    """

    def __init__(
        self,
        events: queue.SimpleQueue[Any],
        session: Session,
        finder: QuestionFinder,
        screen: ChatScreen,
        *,
        barge_in: bool,
        pressed: bool,
        judged: bool = False,
        transcribe: Callable[[np.ndarray], str] | None = None,
        folder: ChatFolder | None = None,
    ) -> None:
        self._events, self._session, self._finder, self._screen, self._folder = events, session, finder, screen, folder
        self._barge_in, self._pressed = barge_in, pressed
        self._asker = Asker(session, self._events.put, turn=judged)
        self._transcriber = None if transcribe is None else Transcriber(transcribe, self._events.put)
        self._microphone: MicrophoneInput
        self._loudspeaker: Loudspeaker
        self._question: SpokenTurn | None = None  # that is being spoken
        self._answer: PlayedAnswer | None = None
        self._count = 0  # questions so far
        self._echo = 0  # samples of the microphone that are still to be passed over
        self._still, self._played = 0, -1.0  # samples since what was played last changed, and what that was
        self._zeros: int | None = 0  # samples of nothing but zeros since the start; None once there was another
        self.whole = True

    # --- the loop -----------------------------------------------------------------------------------------------------

    def run(self, microphone: MicrophoneInput, loudspeaker: Loudspeaker) -> bool:
        """Talk until the input ends; returns whether no answer broke. UserError where a device is gone, or for a question that
        the model does not take."""
        self._microphone, self._loudspeaker = microphone, loudspeaker
        try:
            microphone.start()
            self._listen()
            while (event := self._next()) != "end":
                self._take(event)
        finally:
            self._leave()
        return self.whole

    def _next(self) -> Any:
        try:
            return self._events.get(timeout=GONE)
        except queue.Empty:
            return Lost("input")

    def _take(self, event: Any) -> None:
        if isinstance(event, MicrophoneBlock):
            self._hear(event)
        elif isinstance(event, Answered):
            if self._answer is not None and event.turn is self._answer.turn:
                self._take_answer(self._answer, event)
        elif isinstance(event, Remarked):
            if not event.turn.dropped:
                self._screen.tell(f"warning: {on_one_line(event.text)}")
        elif isinstance(event, Failed):
            if not event.turn.dropped:
                raise event.error
        elif isinstance(event, Transcribed):
            self._show_transcript(event)
        elif isinstance(event, Lost):
            self._raise_lost(event.kind)
        else:
            self._press(event)

    def _leave(self) -> None:
        """End what is under way; the history and the folder keep what was heard."""
        try:
            self._drop_question()
            self._stop_answer("left")
        finally:
            self._asker.close()
            if self._folder is not None:
                self._folder.conversation(self._session)

    def _raise_lost(self, kind: Kind) -> None:
        device: SoundDevice = (self._microphone if kind == "input" else self._loudspeaker).device
        others = listing([other for other in all_devices(self._microphone.sound) if other.index != device.index], kind)
        raise UserError(
            f"the {NAMES[kind]} {device} is gone, or {'gives' if kind == 'input' else 'takes'} no more sound; connect it again "
            f"or choose another with {OPTIONS[kind]}: besides it {others}"
        )

    # --- the microphone -----------------------------------------------------------------------------------------------

    def _hear(self, block: MicrophoneBlock) -> None:
        """Take a block of the microphone."""
        samples = self._microphone.samples(block.raw)
        if block.lost:
            self._screen.tell("warning: sound of the microphone was lost: this machine is too busy to take it in time")
        self._look_for_zeros(samples)
        if self._answer is not None and self._answer.chunks and not self._barge_in and not self._pressed:
            self._echo = round(ECHO * PCM_RATE)
        if self._echo > 0:
            self._echo -= len(samples)
            self._finder.pass_over(samples)
        else:
            for part in self._finder.push(samples):
                self._follow(part)
        self._look_at_answer(len(samples))

    def _look_for_zeros(self, samples: np.ndarray) -> None:
        if self._zeros is None:
            return
        self._zeros = None if samples.any() else self._zeros + len(samples)
        if self._zeros is not None and self._zeros >= DEAD * PCM_RATE:
            self._zeros = None
            self._screen.tell(
                f"warning: the microphone {self._microphone.device} gives nothing but zeros; is it muted, or is this "
                "terminal not allowed to hear it? (--list_devices, --device_in)"
            )

    def _follow(self, part: QuestionPart) -> None:
        """Follow a question that begins, goes on or ends."""
        if part.kind == "began":
            self._stop_answer("interrupted")
            self._question = SpokenTurn(self._count + 1)
            self._finder.question = self._question
            self._asker.ask(self._question)
            self._screen.doing("hearing you", "Enter ends the question" if self._pressed else "")
        elif self._question is None:
            return
        elif part.samples is not None:
            (self._question.look_ahead if part.kind == "ahead" else self._question.put)(part.samples)
        else:
            turn, self._question = self._question, None
            if not turn.question:  # pressed twice before a block came
                turn.drop(0.0)
                self._listen()
                return
            self._end_question(turn, cut=part.kind == "cut")

    def _end_question(self, turn: SpokenTurn, cut: bool) -> None:
        self._count += 1
        self._answer = PlayedAnswer(turn)
        self._loudspeaker.begin()
        turn.end()
        self._still, self._played = 0, -1.0
        if self._folder is not None:
            self._folder.question(turn.number, turn.question)
        if self._transcriber is None:
            self._screen.you(f"({turn.seconds:.1f} s)")
        if cut:
            self._screen.tell(f"warning: the question was cut after {turn.seconds:.1f} s, the longest that the model takes")
        self._screen.doing("thinking")

    def _drop_question(self) -> None:
        if self._question is not None:
            self._question.drop(0.0)
            self._question = None
            self._finder.drop()

    def _listen(self) -> None:
        self._screen.doing("waiting" if self._pressed else "listening", "Enter begins a question" if self._pressed else "")

    # --- the answer ---------------------------------------------------------------------------------------------------

    def _take_answer(self, answer: PlayedAnswer, event: Answered) -> None:
        """Take an event of the answer that is waited for or heard."""
        if isinstance(event.event, TextDelta):
            answer.texts.append((event.event.text, event.event.start))
        elif isinstance(event.event, AudioChunk):
            if len(event.event.samples):
                if not answer.chunks:
                    self._write_down(answer.turn)
                answer.chunks.append(event.event.samples.cpu())
                self._loudspeaker.write(event.event.samples.numpy(force=True))
        elif isinstance(event.event, Ended):
            answer.ended = event.event
            self._loudspeaker.end()
            if not answer.chunks:
                self._write_down(answer.turn)
            if event.event.error is not None:
                self.whole = False
                self._loudspeaker.stop()
                self._answer = None
                self._screen.answered("(broken off)")
                self._screen.tell(f"error: {in_options(event.event.error)}")
                self._listen()

    def _look_at_answer(self, passed: int) -> None:
        """Show what is spoken by now, and see whether all was heard; `passed` samples of the microphone came meanwhile."""
        answer = self._answer
        if answer is None:
            return
        played = self._loudspeaker.played
        if answer.chunks:
            way = "speak to interrupt" if self._barge_in else "Enter or Ctrl-C stops it"
            self._screen.doing("speaking", f"{played:.1f} s; {way}")
        while answer.texts and (answer.texts[0][1] is None or (answer.chunks and answer.texts[0][1] <= played)):
            self._screen.show(answer.texts.popleft()[0])
        if answer.ended is not None and self._loudspeaker.done:
            for text, _ in answer.texts:
                self._screen.show(text)
            self._finish_answer(answer, None, self._figures(answer.ended, played))
            self._listen()
        elif answer.chunks:
            self._still = 0 if played != self._played else self._still + passed
            self._played = played
            if self._still >= GONE * PCM_RATE and self._loudspeaker.waits:
                self._raise_lost("output")

    def _figures(self, ended: Ended, played: float) -> str:
        first = "" if ended.timings.first_audio is None else f", first audio {ended.timings.first_audio * 1e3:.0f} ms"
        return f"({played:.1f} s{first})"

    def _finish_answer(self, answer: PlayedAnswer, played: float | None, note: str) -> None:
        """Note an answer that is over; `played` is how much of it was heard, where that was not all."""
        self._answer = None
        if self._folder is not None:
            self._folder.answer(answer.turn.number, answer.chunks, self._session.sample_rate, played)
        self._screen.answered(note)
        if answer.ended is not None and played is None and answer.ended.reason in REASONS:
            self._screen.tell(REASONS[answer.ended.reason])

    def _stop_answer(self, reason: str) -> None:
        """Silence the answer that is waited for or heard, and cut the history to what was heard."""
        answer = self._answer
        if answer is None:
            return
        played = self._loudspeaker.stop()
        answer.turn.drop(played)
        self._finish_answer(answer, played, f"({reason} after {played:.1f} s)" if played else f"({reason})")

    # --- keys ---------------------------------------------------------------------------------------------------------

    def _press(self, key: Key) -> None:
        """Take a key: Enter begins or ends a question, or stops the answer; Ctrl-C drops or stops either."""
        if key == "interrupt":
            self._drop_question()
            self._stop_answer("stopped")
            self._screen.tell("Ctrl-C again, or Ctrl-D, leaves")
            self._listen()
        elif self._pressed:
            for part in self._finder.press():
                self._follow(part)
        elif self._answer is not None:
            self._stop_answer("stopped")
            self._listen()

    # --- transcripts --------------------------------------------------------------------------------------------------

    def _write_down(self, turn: SpokenTurn) -> None:
        """Have a question transcribed, once its answer has begun, which comes first."""
        if self._transcriber is not None:
            self._transcriber.write_down(np.concatenate(turn.question))

    def _show_transcript(self, transcribed: Transcribed) -> None:
        if transcribed.error is None:
            self._screen.you(transcribed.text.strip())
        else:
            self._transcriber = None
            self._screen.tell(f"warning: no transcripts: {in_options(transcribed.error)}")


class ChatFolder:
    """Writes `question-1.wav`, `answer-1.wav`, ..., and `conversation.safetensors` into a folder; UserError where it cannot."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder)
        self.path.mkdir(exist_ok=True)

    def question(self, number: int, pieces: Sequence[np.ndarray]) -> None:
        """Write a question, samples int16 at `PCM_RATE`."""
        sound = np.concatenate([np.zeros(0, np.int16), *pieces])
        self._write(f"question-{number}.wav", torch.from_numpy(sound.astype(np.float32) / 32768), PCM_RATE)

    def answer(self, number: int, chunks: Sequence[torch.Tensor], rate: int, played: float | None) -> None:
        """Write an answer, samples float32; as far as it was heard where `played` is given, in seconds."""
        sound = torch.cat([torch.zeros(0), *chunks])
        self._write(f"answer-{number}.wav", sound if played is None else sound[: round(played * rate)], rate)

    def _write(self, name: str, sound: torch.Tensor, rate: int) -> None:
        if len(sound):
            write_audio(self.path / name, sound, rate)

    def conversation(self, session: Session) -> None:
        """Write the conversation, where it has a turn."""
        if session.turns:
            session.save(self.path / CONVERSATION)
