"""The input of a session: its buffer, voice activity, the turns found in it, and their transcripts by the model (task A1T1)."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from infer.pcm import G711_RATE, PCM_RATE, Resampler, decode, to_int16
from infer.serve.realtime.dialogue import closed, opened
from infer.serve.realtime.protocol import LONGEST_APPEND, Event, ProtocolError, as_protocol_error, broken, new_id
from infer.serve.realtime.responses import Responses
from infer.serve.realtime.state import ContentPart, ConversationItem, SessionState, check_length
from infer.turns.detector import SemanticVad, TurnDetector, TurnEvent
from infer.turns.vad import SpeechStream
from omni.errors import UserError
from omni.generate.results import Ended, TextDelta

SHORTEST = 0.1  # seconds of the shortest sound that can be committed, as in OpenAI's
KEPT = 4.0  # seconds that are kept, while nobody speaks, besides the padding of a turn
FAINT = 64  # steps of 16 bits between the lowest and the highest sample of silence: -60 dB
PIECE = 0.1  # seconds of the pieces that are given at least; each takes some time of the loop

AFTER = 1.0  # seconds for which a transcript waits for the first sound of the answer, which comes first
TRANSCRIPT_TOKENS = 512  # tokens of a transcript
EVERY = 0.6  # seconds between two of a turn at least
REST = 3.0  # how many times as long as the last one took nothing is understood at least: a long turn takes longer each time
CHARACTERS = 30  # characters of a second of speech at most; a model that writes more has lost its way, and nothing is told

WRITTEN, PARTIAL = "conversation.item.input_audio_transcription", "omni.input_audio_transcription.partial"
"""Beginning of the types of events of a transcript, and type of those of a turn that is not over."""


class InputBuffer:
    """Samples at 24 kHz, at most so many seconds, from second `start` to `end` of the session's input."""

    def __init__(self, most: float) -> None:
        self.most = most
        self._form, self._rate = "audio/pcm", Resampler(PCM_RATE, PCM_RATE)
        self._data = bytearray()  # samples of two bytes; a last byte alone waits for the second half of its sample
        self._gone = 0  # samples of the input before them

    @property
    def seconds(self) -> float:
        return len(self._data) // 2 / PCM_RATE

    @property
    def start(self) -> float:
        return self._gone / PCM_RATE

    @property
    def end(self) -> float:
        return (self._gone + len(self._data) // 2) / PCM_RATE

    def append(self, data: bytes, form: str) -> np.ndarray:
        """Take raw sound of a format, in pieces that may end within a sample; returns its whole samples [S] at 24 kHz, int16.
        ProtocolError for more sound than it holds."""
        rate, width = (PCM_RATE, 2) if form == "audio/pcm" else (G711_RATE, 1)
        if self.seconds + len(data) / (rate * width) > self.most:
            problem = f"the buffer holds at most {self.most:g} s of sound; commit or clear it"
            raise ProtocolError(problem, "input_audio_buffer_full", "audio")
        if form != self._form:
            self._form, self._rate = form, Resampler(rate, PCM_RATE)
            self.drop_half_sample()
        if form != "audio/pcm":
            data = to_int16(self._rate.push(decode(data, form))).tobytes()
        count = len(self._data) // 2
        self._data += data
        return self.part(self.start, count, self.end)

    def add(self, samples: np.ndarray) -> np.ndarray:
        """Take samples [S] at 24 kHz, int16, for which the oldest make room."""
        self.forget(self.end + len(samples) / PCM_RATE - self.most)
        self._data += samples.tobytes()
        return samples

    def forget(self, before: float) -> None:
        """Drop what came before a second of the input."""
        count = min(max(round(before * PCM_RATE) - self._gone, 0), len(self._data) // 2)
        del self._data[: 2 * count]
        self._gone += count

    def part(self, first: float, skip: int, last: float) -> np.ndarray:
        """The samples [S], int16, between two seconds of the input, without the first `skip` that are there."""
        begin = skip + max(round(first * PCM_RATE) - self._gone, 0)
        end = min(round(last * PCM_RATE) - self._gone, len(self._data) // 2)
        return np.frombuffer(self._data[2 * begin : 2 * max(begin, end)], "<i2")

    def take(self, first: float = 0.0, last: float = math.inf) -> np.ndarray:
        """The samples [S], int16, between two seconds of the input; the buffer keeps what came after them."""
        last = min(last, self.end)
        sound = self.part(first, 0, last)
        self.forget(last)
        return sound

    def drop_half_sample(self) -> None:
        """Drop the first half of a sample: the next bytes begin with a whole one."""
        del self._data[len(self._data) // 2 * 2 :]


class TurnSound:
    """The engine's listening (`omni.generate.listening`, made by `listen`) to one turn; `over`: it has ended, or was never
    possible."""

    def __init__(self, listen: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self.over = False
        self._listen = listen
        self._listening: Any = None
        self._pushed: list[np.ndarray] = []
        self._count = self._peeked = 0  # samples, of which the latter may not belong to the turn

    @property
    def listening(self) -> Any:
        """The engine's listening; None where it does not listen."""
        return None if self.over else self._listening

    async def begin(self) -> None:
        """Begin to listen; a question that the engine cannot listen to is asked whole."""
        try:
            self._listening = await self._listen()
        except UserError:
            self.over = True
        if self.over:
            await self.drop()

    def follow(self, buffer: InputBuffer, first: float, last: float) -> None:
        """Pushes new samples of the turn from the buffer: from second `first` of the input to second `last`, before which all
        surely belongs to it. The turn head also peeks at what came since."""
        if (listening := self.listening) is None:
            return
        try:
            if len(samples := buffer.part(first, self._count, last)) >= PIECE * PCM_RATE:
                listening.push(samples)
                self._pushed.append(samples)
                self._count += len(samples)
            count = max(self._count, self._peeked)
            if listening.turn is not None and len(samples := buffer.part(first, count, buffer.end)) >= PIECE * PCM_RATE:
                listening.peek(samples)
                self._peeked = count + len(samples)
        except UserError:  # too long, or the engine was lost: the question says so
            self.over = True

    def heard(self, session: Any, sound: np.ndarray) -> Any:
        """The session's listening to the committed sound [S], with the rest pushed; None where it heard other sound or none."""
        pushed = np.concatenate([*self._pushed, sound[:0]])
        listening = self.listening
        if listening is None or listening.session is not session or not np.array_equal(pushed, sound[: len(pushed)]):
            return None
        try:
            listening.push(sound[len(pushed) :])
        except UserError:
            self.over = True
        return self.listening

    async def drop(self) -> None:
        """Drop the listening: the sound was no question."""
        self.over = True
        listening, self._listening = self._listening, None
        if listening is not None:
            await asyncio.to_thread(listening.drop)


class Transcripts:
    """Writes down the items of one session, one after another, and its turn again and again until it is committed or dropped.

    For the latter one session of the engine is asked each time, which holds what it was asked before of the same sound.
    """

    def __init__(self, owner: SessionState, responses: Responses) -> None:
        self._owner, self._responses = owner, responses
        self._lock = asyncio.Lock()
        self._session: Any = None
        self._task: asyncio.Task[None] | None = None
        self._due = self._asked = 0.0
        self._sent_text = ""

    async def write(self, item: ConversationItem) -> None:
        """Write an item down."""
        async with self._lock:
            if (response := self._responses.active) is not None:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(response.first.wait(), AFTER)
            part, where = item.content[0], {"item_id": item.id, "content_index": 0}
            try:
                part.text = "" if part.silent else await self._text(part.sound, where)
            except (UserError, ProtocolError) as error:
                cause = as_protocol_error(error)
                failure = {"type": cause.error_type, "code": "transcription_failed", "message": str(cause)}
                self._owner.send({"type": f"{WRITTEN}.failed", **where, "error": failure})
                return
            usage = {"type": "duration", "seconds": round(item.seconds, 3)}
            self._owner.send({"type": f"{WRITTEN}.completed", **where, "transcript": part.text, "usage": usage})

    async def _text(self, sound: Any, where: Event) -> str:
        """The transcript; its pieces are sent as they come."""
        text, engine = "", self._owner.host.engine
        session = await opened(engine, max_tokens=TRANSCRIPT_TOKENS)
        try:
            async with session.ask(sound, "A1T1", sample_rate=PCM_RATE) as events:
                async for event in events:
                    if isinstance(event, TextDelta):
                        text += event.text
                        self._owner.send({"type": f"{WRITTEN}.delta", **where, "delta": event.text})
                    elif isinstance(event, Ended) and event.reason == "error":
                        raise broken(event.error, engine)
        finally:
            await closed(session)
        return text.strip()

    # --- turns that are not over --------------------------------------------------------------------------------------

    def follow(self, item: str, first: float, last: float, question: Callable[[], Any]) -> None:
        """Transcribes a turn of seconds `first` to `last` of the input, for its future item, when the next transcript is due.
        `question` makes the question of the turn so far; None where there is nothing yet."""
        if self._task is None and last > self._asked and time.monotonic() >= self._due:
            self._due, self._asked = time.monotonic() + EVERY, last
            self._task = self._owner.spawn(self._follow(item, last - first, question))

    def stop(self) -> None:
        """The turn was committed or dropped: what is under way is cancelled, and nobody waits for it."""
        task, self._task, self._sent_text = self._task, None, ""
        self._due = time.monotonic() + EVERY
        if task is not None:
            task.cancel()

    async def _follow(self, item: str, seconds: float, question: Callable[[], Any]) -> None:
        start, session = time.monotonic(), None
        try:
            if not await asyncio.to_thread(self._owner.host.spare) or (asked := question()) is None:
                return
            if self._session is None:
                context = self._owner.settings.answering.context
                self._session = await opened(self._owner.host.engine, max_tokens=TRANSCRIPT_TOKENS, context=context)
            session = self._session
            text = await self._partial(session, asked, round(CHARACTERS * (seconds + 1)))
            if text and text != self._sent_text:
                self._sent_text = text
                self._owner.send({"type": PARTIAL, "item_id": item, "content_index": 0, "transcript": text})
            session = None
        except UserError:  # nothing was heard yet, or the engine was lost: the turn's own transcript says so
            pass
        finally:
            if self._task is asyncio.current_task():
                self._task = None
            self._due = max(self._due, time.monotonic() + REST * (time.monotonic() - start))
            if session is not None:  # its history is not known
                await self.close()

    async def _partial(self, session: Any, question: Any, most: int) -> str:
        """The transcript, "" where it has more than `most` characters; the session forgets it."""
        text = ""
        async with session.ask(question, "A1T1", sample_rate=PCM_RATE) as events:
            async for event in events:
                if isinstance(event, TextDelta):
                    text += event.text
                if len(text) > most or (isinstance(event, Ended) and event.reason == "error"):
                    text = ""
                    break
            await asyncio.to_thread(session.end, events.running, "withdraw")
        return text.strip()

    async def close(self) -> None:
        """Close the session that turns were asked in."""
        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(UserError):
                await closed(session)


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
        self._transcripts.stop()
        turn, self._turn, self._item = self._turn, None, ""
        if turn is not None:
            self._owner.spawn(turn.drop())
        wanted = self._owner.configuration.audio.input.turn_detection
        self._detector = None if wanted is None else TurnDetector(wanted, self.buffer.end)
        self._stream = SpeechStream()

    async def append(self, data: bytes) -> None:
        """Take raw sound in the session's format; ProtocolError for more of it than one event may bring."""
        if len(data) > LONGEST_APPEND:
            problem = f"audio is longer than {LONGEST_APPEND // 2**20} MiB; send it in pieces"
            raise ProtocolError(problem, "string_above_max_length", "audio")
        await self._follow(self.buffer.append(data, self._owner.configuration.audio.input.format.type))

    async def take(self, samples: np.ndarray) -> None:
        """Take samples [S] at 24 kHz, which come whether anybody speaks or not: the oldest make room."""
        await self._follow(self.buffer.add(to_int16(samples)))

    async def _follow(self, samples: np.ndarray) -> None:
        """Follow the turns in new samples; the sound that surely belongs to the present one is given to the engine, and to
        partial transcripts."""
        self.uncounted += len(samples) / PCM_RATE
        if not len(samples):
            return
        await self._find_turns(samples)
        detector, buffer = self._detector, self.buffer
        if not buffer.seconds or (detector is not None and not detector.speaking):
            return
        if detector is None and not self._item:
            self._item = new_id("item")
        if self._owner.configuration.omni.partial_transcripts:
            self._transcripts.follow(self._item, *self._span, self._so_far)
        semantic = detector is not None and isinstance(detector.settings, SemanticVad)
        if self._turn is None and (listen := self._responses.listen(semantic)) is not None:
            self._turn = TurnSound(listen)
            self._owner.spawn(self._turn.begin())
        if self._turn is not None:
            self._turn.follow(buffer, *self._span)

    @property
    def _span(self) -> tuple[float, float]:
        """Seconds of the input at which the present turn begins, and before which all surely belongs to it."""
        if self._detector is None:
            return self.buffer.start, self.buffer.end
        return self._begins, self._detector.voiced + self._owner.settings.padding - 0.001  # less a rounding

    def _so_far(self) -> Any:
        """The present turn as a question: the engine's listening, or else its sound; None where it is too short or too long."""
        if self._turn is not None and self._turn.listening is not None:
            return self._turn.listening.so_far()
        begin, sure = self._span
        sound = self.buffer.part(begin, 0, sure)
        return sound if SHORTEST <= len(sound) / PCM_RATE <= self._owner.longest else None

    async def _find_turns(self, samples: np.ndarray) -> None:
        if self._detector is None:
            return
        for probability in await self._owner.vad.push(self._stream, samples):
            detector = self._detector
            if detector is None:  # it was switched off meanwhile
                return
            listening = None if self._turn is None else self._turn.listening
            said = detector.said(None if listening is None else listening.turn, self._first)
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
        if endpointing is not None:
            owner.metrics.endpointing.observe(endpointing)
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
        """Make an item of committed sound [S], and have it written down where the client asks for that."""
        self._transcripts.stop()
        turn, self._turn, self._item = self._turn, None, ""
        owner = self._owner
        if silent and turn is not None:
            owner.spawn(turn.drop())
            turn = None
        item = ConversationItem("message", "user", id=item_id)
        item.content.append(ContentPart("input_audio", None, sound, silent=silent, turn=turn))
        last = owner.items[-1].id if owner.items else None
        owner.send({"type": "input_audio_buffer.committed", "previous_item_id": last, "item_id": item_id})
        owner.add_item(item)
        if owner.configuration.audio.input.transcription is not None or owner.configuration.type == "transcription":
            owner.spawn(self._transcripts.write(item))

    def clear(self) -> None:
        """Drop what the buffer holds."""
        self.buffer.drop_half_sample()
        self.buffer.take()
        self._restart()

    def answered(self) -> None:
        """An answer has ended; the silence of its listener counts from here."""
        if self._detector is not None:
            self._detector.idle_since = self._detector.now
