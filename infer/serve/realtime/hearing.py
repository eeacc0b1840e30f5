"""The input of a session: its buffer, voice activity, and the turns found in it."""

from __future__ import annotations

from typing import Any

import numpy as np

from infer.pcm import PCM_RATE, to_int16
from infer.serve.realtime.input_buffer import InputBuffer, TurnSound
from infer.serve.realtime.items import check_length
from infer.serve.realtime.protocol import ProtocolError, new_id
from infer.serve.realtime.responses import Responses
from infer.serve.realtime.state import SessionState
from infer.serve.realtime.transcripts import Transcripts
from infer.turns.detector import SemanticVad, TurnDetector, TurnEvent
from infer.turns.vad import SpeechStream

SHORTEST = 0.1  # seconds of the shortest sound that can be committed, as in OpenAI's
KEPT = 4.0  # seconds that are kept, while nobody speaks, besides the padding of a turn
FAINT = 64  # steps of 16 bits between the lowest and the highest sample of silence: -60 dB


class SessionInput:
    """The input of one session; `uncounted` are seconds of sound that came and were not yet counted for the client's key."""

    def __init__(self, owner: SessionState, responses: Responses, transcripts: Transcripts) -> None:
        self._owner, self._responses, self._transcripts = owner, responses, transcripts
        self.buffer = InputBuffer(min(max(owner.longest + 10, 60.0), 600.0))
        self.uncounted = 0.0
        self._detector: TurnDetector | None = None
        self._stream = SpeechStream()
        self._item = ""  # id of the item that the present turn is going to be
        self._begins = self._first = 0.0  # second at which the present turn's sound begins, and what the buffer has of it
        self._turn: TurnSound | None = None  # what the engine hears of it
        self.configure()

    def configure(self) -> None:
        """Take changed settings over."""
        wanted = self._owner.configuration.audio.input.turn_detection
        if wanted is not None and self._detector is not None:
            self._detector.settings = wanted
        elif wanted is not None or self._detector is not None:
            self._restart()

    def _restart(self) -> None:
        """Drop the present turn, and look for the next one in what comes."""
        self._drop()
        wanted = self._owner.configuration.audio.input.turn_detection
        self._detector = None if wanted is None else TurnDetector(wanted, self.buffer.end)
        self._stream = SpeechStream()

    async def append(self, data: bytes) -> None:
        """Take raw sound in the session's format."""
        form = self._owner.configuration.audio.input.format.type
        await self._follow(self.buffer.append(data, form))

    async def take(self, samples: np.ndarray) -> None:
        """Take samples [S] at 24 kHz, which come whether anybody speaks or not: the oldest make room."""
        self.buffer.make_room(len(samples))
        await self._follow(self.buffer.add(to_int16(samples)))

    async def _follow(self, samples: np.ndarray) -> None:
        """Follow the turns in new samples."""
        self.uncounted += len(samples) / PCM_RATE
        if len(samples):
            await self._find_turns(samples)
            self._listen()

    def _listen(self) -> None:
        """Pass the sound that surely belongs to the present turn to the engine and to partial transcripts."""
        detector, buffer = self._detector, self.buffer
        if not buffer.seconds or (detector is not None and not detector.speaking):
            return
        if detector is None and not self._item:
            self._item = new_id("item")
        if self._owner.configuration.omni.partial_transcripts:
            self._transcripts.follow(self._item, self._start, self._sure, self._so_far)
        semantic = detector is not None and isinstance(detector.settings, SemanticVad)
        self._turn = self._turn or self._responses.listen(semantic)
        if self._turn is not None:
            self._turn.follow(buffer, self._start, self._sure)

    @property
    def _start(self) -> float:
        """Second of the input at which the present turn begins."""
        return self.buffer.start if self._detector is None else self._begins

    @property
    def _sure(self) -> float:
        """Second of the input before which all surely belongs to the present turn."""
        if self._detector is None:
            return self.buffer.end
        return self._detector.voiced + self._owner.settings.padding - 0.001  # less a rounding

    def _so_far(self) -> Any:
        """The present turn as a question: the engine's listening, or else its sound; None where it is too short or too long."""
        if self._turn is not None and (heard := self._turn.so_far()) is not None:
            return heard
        sound = self.buffer.part(self._start, 0, self._sure)
        return sound if SHORTEST <= len(sound) / PCM_RATE <= self._owner.longest else None

    async def _find_turns(self, samples: np.ndarray) -> None:
        if self._detector is None:
            return
        for probability in await self._owner.vad.push(self._stream, samples):
            detector = self._detector
            if detector is None:  # it was switched off meanwhile
                return
            said = detector.said(None if self._turn is None else self._turn.frames, self._first)
            for event in detector.push(probability, self._responses.playing, said):
                await self._act(event)
            if detector.speaking and detector.now - self._begins >= self._owner.longest - 0.5:
                detector.stop()
                await self._act(TurnEvent("ended", detector.now, detector.now))
            if not detector.speaking:
                self.buffer.forget(detector.now - detector.padding - KEPT)

    async def _act(self, event: TurnEvent) -> None:
        owner = self._owner
        detection = owner.configuration.audio.input.turn_detection
        if event.kind in ("duck", "restore"):
            self._responses.duck(event.kind == "duck")
        elif event.kind == "began":
            self._responses.duck(False)
            padding = 0.0 if self._detector is None else self._detector.padding
            self._item, self._begins = new_id("item"), max(event.at - min(padding, owner.settings.padding), 0.0)
            started = {"audio_start_ms": round(max(event.at - padding, 0.0) * 1000), "item_id": self._item}
            owner.send({"type": "input_audio_buffer.speech_started", **started})
            self._first = max(self._begins, self.buffer.start)
            if detection is not None and detection.interrupt_response:
                await self._responses.interrupt()
        elif event.kind == "ended":
            stopped = {"audio_end_ms": round(event.at * 1000), "item_id": self._item}
            owner.send({"type": "input_audio_buffer.speech_stopped", **stopped})
            self._end_turn(event.at, event.decided, event.decided - event.at)
        else:
            self._item, self._begins = new_id("item"), self.buffer.start
            times = {"audio_start_ms": round(event.at * 1000), "audio_end_ms": round(event.decided * 1000)}
            owner.send({"type": "input_audio_buffer.timeout_triggered", **times, "item_id": self._item})
            self._end_turn(event.decided, event.decided, None)

    def _end_turn(self, ended: float, decided: float, endpointing: float | None) -> None:
        """Commit the turn's sound, and have it answered; what came after the decision is kept for the next turn."""
        owner = self._owner
        sound = self.buffer.take(self._begins, ended + owner.settings.padding)
        self.buffer.forget(decided)
        owner.metrics.endpointed(endpointing)
        self._add(self._item, sound[: int(owner.longest * PCM_RATE)])
        detection = owner.configuration.audio.input.turn_detection
        if owner.configuration.type == "realtime" and detection is not None and detection.create_response:
            self._responses.respond_to_turn(endpointing)

    def commit(self) -> None:
        """Make an item of the whole buffer, as the client asks; ProtocolError where it has too little, or too much, which is
        kept."""
        if self.buffer.seconds < SHORTEST:
            milliseconds, least = self.buffer.seconds * 1000, SHORTEST * 1000
            raise ProtocolError(
                f"the input buffer has {milliseconds:.0f} ms of sound; at least {least:.0f} ms can be committed",
                "input_audio_buffer_commit_empty",
            )
        speaking = self._detector is not None and self._detector.speaking
        first = max(self.buffer.start, self._begins if speaking else 0.0)
        length = self.buffer.end - first
        way = "send input_audio_buffer.clear, and commit shorter pieces"
        check_length(length * PCM_RATE, self._owner.longest, "the input buffer", way, "audio")
        item = self._item if speaking or self._detector is None else ""
        unheard = self._detector is not None and not speaking and self._detector.voiced <= self.buffer.start
        if self._detector is not None and speaking:
            self._detector.stop()
        self.buffer.drop_half_sample()
        sound = self.buffer.take(first)
        self._add(item or new_id("item"), sound, unheard or int(sound.max()) - int(sound.min()) <= FAINT)

    def _add(self, item_id: str, sound: np.ndarray, silent: bool = False) -> None:
        if silent:
            self._drop()
        self._transcripts.stop()
        turn, self._turn, self._item = self._turn, None, ""
        owner = self._owner
        item = owner.add_spoken(item_id, sound)
        item.content[0].turn, item.content[0].silent = turn, silent
        if owner.configuration.audio.input.transcription is not None or owner.configuration.type == "transcription":
            owner.spawn(self._transcripts.write(item))

    def _drop(self) -> None:
        self._transcripts.stop()
        turn, self._turn, self._item = self._turn, None, ""
        if turn is not None:
            self._owner.spawn(turn.drop())

    def clear(self) -> None:
        """Drop what the buffer holds."""
        self.buffer.drop_half_sample()
        self.buffer.take()
        self._restart()

    def answered(self) -> None:
        """An answer has ended; the silence of its listener counts from here."""
        if self._detector is not None:
            self._detector.wait()
