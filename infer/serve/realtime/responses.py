"""The responses of a session: how they begin, their events in the order of the protocol, and how they are interrupted and cut.

response.created > rate_limits.updated > output_item.added > item.added > content_part.added > deltas >
output_audio.done > output_audio_transcript.done > content_part.done > item.done > output_item.done > response.done
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal

import numpy as np

from infer.pcm import Resampler, encode
from infer.serve.realtime.configuration import Configuration, overridden
from infer.serve.realtime.dialogue import PROMPT, Dialogue, DialogueTurn, options_of, prompted, speaks, task_of, turns_of
from infer.serve.realtime.playback import Outlet, Pacer
from infer.serve.realtime.protocol import Event, ProtocolError, ResponseOptions, as_protocol_error, broken, filled, new_id
from infer.serve.realtime.state import ContentPart, ConversationItem, SessionState, read_item
from omni.errors import UserError
from omni.generate.answer_stream import AnswerStream
from omni.generate.results import AudioChunk, Ended, TextDelta

StopReason = Literal["turn_detected", "client_cancelled"]

NOTHING = "there is no question without an answer; add a user's item, commit the input buffer, or give instructions"

CANCELLED = Ended("cancelled", None)  # type: ignore[arg-type]

QUEUE_LOOK = 0.5  # seconds between two looks at the place of a question that waits for room


class Response:
    """A response under way, or the last one; `item` is its answer.

    Args:
        dialogue: that it belongs to.
        configuration: the session's, with what `response.create` changed.
        before, question: the turns before, and what is to be answered; None where there is nothing.
        metadata: the client's, given back as it is.
        conversation: whether it becomes part of the session's conversation.
        endpointing: seconds from the end of speech to the question, where voice activity decided it.

    Attributes:
        first, over: set with its first output or its end, and when `response.done` was sent.
    """

    def __init__(
        self,
        owner: SessionState,
        dialogue: Dialogue,
        configuration: Configuration,
        before: Sequence[DialogueTurn],
        question: DialogueTurn | None,
        metadata: dict[str, str] | None = None,
        conversation: bool = True,
        endpointing: float | None = None,
    ) -> None:
        self.id, self.conversation = new_id("resp"), conversation
        self._configuration, self._before, self._question = configuration, before, question
        self._metadata, self._endpointing, self._since = metadata, endpointing, time.monotonic()
        prompt = question.part if question is not None and question.mark[:2] == PROMPT else None
        self.item = ConversationItem("message", "assistant", status="in_progress", prompt=prompt)
        self._where = {"response_id": self.id, "item_id": self.item.id, "output_index": 0, "content_index": 0}
        self.speaks = speaks(owner, configuration)
        self.first, self.over = asyncio.Event(), asyncio.Event()
        self.status = "in_progress"
        self._owner, self.dialogue = owner, dialogue
        self._part = ContentPart("output_audio" if self.speaks else "output_text", "")
        form = configuration.audio.output.format
        self._form = form.type
        self.outlet: Outlet = owner.transport.outlet(form.samples_per_second, self._emit_sound)
        self.outlet.tell = lambda state: owner.send({"type": f"output_audio_buffer.{state}", "response_id": self.id})
        self._pacer = Pacer(self.outlet, owner.settings.lead)
        self._events: AnswerStream | None = None
        self._stop_reason: StopReason | None = None
        self._heard: float | None = None
        self._cut = asyncio.Event()  # the history was cut to that
        self._begun = self._sounded = False
        self._usage = {"input": 0, "text": 0, "audio": 0}

    # --- the course of it ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Answer, up to `response.done`."""
        error: Exception | None = None
        ended = CANCELLED
        try:
            try:
                ended = await self._answer()
            except Exception as raised:
                if not isinstance(raised, (UserError, ProtocolError)):
                    self._owner.log.exception("response failed")
                error = raised
            await self._finish(ended, error)
        finally:
            error = None  # its traceback has this frame
            self.end()

    def end(self) -> None:
        """Nothing more comes of it, and nothing is held for it."""
        self.outlet.end()
        self._before, self._events = (), None
        self.first.set()
        self.over.set()

    async def _answer(self) -> Ended:
        """Ask, and pass the answer on; returns its end once all was sent."""
        if (question := self._question) is None:
            raise UserError(NOTHING)
        if question.part.silent:
            raise ProtocolError("there is no speech in the sound that was committed", "no_speech")
        options = options_of(self._owner, self._configuration, self.speaks)
        task = task_of(self._configuration, question.spoken, self.speaks)
        if task == "A1T1":
            self.speaks, self._part.type = False, "output_text"
        self._events = events = await self.dialogue.ask(self._before, question, self.item, task, options)
        if self._stop_reason is not None:
            return CANCELLED
        looking = asyncio.create_task(self._tell_place())
        pacing = asyncio.create_task(self._pacer.run(self._emit_text))
        try:
            ended = await self._pass_on(events)
            looking.cancel()
            self._pacer.close()
            await pacing
        finally:
            looking.cancel()
            pacing.cancel()
        return ended

    async def _pass_on(self, events: AnswerStream) -> Ended:
        """Give the engine's events to the pacer, as they come."""
        rate = Resampler(self._owner.host.engine.sample_rate, self.outlet.rate) if self.speaks else None
        async for event in events:
            if isinstance(event, TextDelta):
                self._begin()
                self._usage["text"] += 1
                self._pacer.text(event.text, event.start if self.speaks else None)
            elif isinstance(event, AudioChunk) and rate is not None:
                self._begin()
                self._usage["audio"] += 1
                self._pacer.sound(rate.push(event.samples.numpy()))
            elif isinstance(event, Ended):
                turn = None if events.running is None else events.running.asked.turn
                self._usage["input"] = 0 if turn is None else int(turn.features or len(turn.question))
                if rate is not None and event.reason != "cancelled":
                    self._pacer.sound(rate.finish())
                return event
        return CANCELLED

    async def stop(self, reason: StopReason) -> None:
        """End it here: nothing is sent any more, and the history keeps what was heard. Returns after `response.done`."""
        if not self.over.is_set() and self._stop_reason is None:
            self._stop_reason, self._heard = reason, self.outlet.heard if self.speaks else None
            self._pacer.close(at_once=True)
            self.outlet.clear()
            try:
                if self._events is not None:
                    await self.dialogue.interrupt(self._events, self._heard)
            except UserError:  # the engine was lost; `run` says so
                pass
            finally:
                self._cut.set()
        await self.over.wait()

    async def _tell_place(self) -> None:
        """Tell the page its place while the question waits for room."""
        reported = 0
        while self._owner.wants_omni and not self._begun:
            await asyncio.sleep(QUEUE_LOOK)
            position = await self.dialogue.queue_position()
            if position != reported:
                reported = position
                self._owner.send({"type": "omni.queue", "response_id": self.id, "place": position})

    # --- events -------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Send what comes before the first delta, once."""
        if self._begun:
            return
        self._begun = True
        send = self._owner.send
        send({"type": "response.output_item.added", "output_index": 0, "item": self.item.shown(), "response_id": self.id})
        if self.conversation:
            self._owner.tell_item("added", self.item)
        self.item.content = [self._part]
        send({"type": "response.content_part.added", **self._where, "part": self._shown_part("")})
        self.first.set()

    def _shown_part(self, text: str) -> Event:
        return {"type": "audio", "transcript": text} if self.speaks else {"type": "text", "text": text}

    def _emit_text(self, text: str) -> None:
        self._part.text = (self._part.text or "") + text
        name = "output_audio_transcript" if self.speaks else "output_text"
        self._owner.send({"type": f"response.{name}.delta", **self._where, "delta": text})

    def _emit_sound(self, samples: np.ndarray) -> None:
        owner = self._owner
        if not self._sounded:
            self._sounded, seconds = True, time.monotonic() - self._since
            owner.metrics.first.observe(seconds)
            if owner.wants_omni:
                endpointing = None if self._endpointing is None else round(self._endpointing * 1000)
                timings = {"endpointing_ms": endpointing, "first_audio_ms": round(seconds * 1000)}
                owner.send({"type": "omni.timings", "item_id": self.item.id, "response_id": self.id, **timings})
        if owner.transport.sound_in_events:
            delta = base64.b64encode(encode(samples, self._form)).decode()
            owner.send({"type": "response.output_audio.delta", **self._where, "delta": delta})

    async def _finish(self, ended: Ended, error: Exception | None) -> None:
        """Settle the history and send the events of the end."""
        if error is None and ended.reason == "error":
            error = broken(ended.error, self.dialogue.engine)
        status, details = self._outcome(ended, error)
        self.status = status
        if self._events is not None and error is None:
            await self._settle()
        elif self.conversation:
            self.dialogue.broke()
        self.item.status = "completed" if status == "completed" else "incomplete"
        self.item.sent = self.outlet.sent
        send = self._owner.send
        if self._begun:
            text = self._part.text or ""
            if self.speaks:
                send({"type": "response.output_audio.done", **self._where})
                send({"type": "response.output_audio_transcript.done", **self._where, "transcript": text})
            else:
                send({"type": "response.output_text.done", **self._where, "text": text})
            send({"type": "response.content_part.done", **self._where, "part": self._shown_part(text)})
            if self.conversation:
                self._owner.tell_item("done", self.item)
            send({"type": "response.output_item.done", "output_index": 0, "item": self.item.shown(), "response_id": self.id})
        elif self.conversation:
            self._owner.items.discard(self.item)
        response = {**self.shown(status), "status_details": details, "usage": self._used()}
        send({"type": "response.done", "response": filled(response)})

    async def _settle(self) -> None:
        """Take the answer as the history has it."""
        assert self._events is not None
        if self._stop_reason is not None:
            await self._cut.wait()
        if self._events.running is None:
            self.dialogue.broke()
            return
        try:
            self.item.answer = await self.dialogue.settled(self._events)
        except UserError:  # the engine was lost meanwhile
            return
        if self._stop_reason is not None and self.speaks and self.item.answer is not None:
            self.item.heard = self._heard
            self._part.text = self.item.answer.text or ""

    def _outcome(self, ended: Ended, error: Exception | None) -> tuple[str, Event | None]:
        """Status of the response, and its details."""
        if self._stop_reason is not None:
            return "cancelled", {"type": "cancelled", "reason": self._stop_reason}
        if error is not None:
            cause = as_protocol_error(error)
            return "failed", {"type": "failed", "error": {"type": cause.error_type, "code": cause.code, "message": str(cause)}}
        if ended.reason in ("length", "cache"):
            return "incomplete", {"type": "incomplete", "reason": "max_output_tokens"}
        return "completed", None

    def shown(self, status: str) -> Event:
        """The `response` object of events."""
        shown: dict[str, Any] = {
            "object": "realtime.response",
            "id": self.id,
            "status": status,
            "conversation_id": self._owner.conversation_id if self.conversation else None,
            "output": [self.item.shown()] if self._begun and status != "in_progress" else [],
            "output_modalities": ["audio"] if self.speaks else ["text"],
            "max_output_tokens": self._configuration.max_output_tokens,
            "metadata": self._metadata,
        }
        if self.speaks:
            output = self._configuration.audio.output
            voice = self._owner.voices.adapter(output.voice) or "default"
            shown["audio"] = {"output": {"format": output.format.shown(), "voice": voice}}
        return filled(shown)

    def _used(self) -> Event:
        """Tokens of the question, and of the answer: pieces of text, and chunks of sound."""
        used = self._usage
        out = used["text"] + used["audio"]
        spoken = self._question is not None and self._question.spoken
        input_details = {"text_tokens": 0 if spoken else used["input"], "audio_tokens": used["input"] if spoken else 0}
        return {
            "total_tokens": used["input"] + out,
            "input_tokens": used["input"],
            "output_tokens": out,
            "input_token_details": {**input_details, "cached_tokens": 0},
            "output_token_details": {"text_tokens": used["text"], "audio_tokens": used["audio"]},
        }


class Responses:
    """The responses of one session: those of its conversation, one after another (`last`), and those beside it.

    Attributes:
        ducked: the sound of the last is softer, because somebody speaks.
        dialogue: the conversation with the engine.
    """

    def __init__(self, owner: SessionState) -> None:
        self.last: Response | None = None
        self.ducked = False
        self._owner, self.dialogue = owner, Dialogue(owner.host)
        self._beside: set[Response] = set()
        self._waits: tuple[float | None, ...] = ()  # of the turn that came during an answer that it does not interrupt

    @property
    def active(self) -> Response | None:
        """The conversation's response that is under way."""
        return self.last if self.last is not None and not self.last.over.is_set() else None

    def of(self, item: ConversationItem) -> Response | None:
        """The conversation's last response, where its answer is that item."""
        return self.last if self.last is not None and self.last.item is item else None

    @property
    def playing(self) -> bool:
        """Whether an answer is heard, or about to be."""
        return self.active is not None or (self.last is not None and self.last.outlet.ahead() > 0)

    def create(self, options: ResponseOptions) -> None:
        """Begin the response that a client asks for."""
        if self._owner.configuration.type == "transcription":
            raise ProtocolError("a transcription session writes down what it hears and answers nothing", "invalid_session_type")
        overrides = options.model_extra or {}
        configuration = overridden(self._owner.configuration, overrides)
        alone = options.conversation == "none"
        items = list(self._owner.items) if options.input is None else self._read_input(options.input)
        before, question = turns_of(items)
        question = question or prompted(items, overrides.get("instructions") or "", configuration.instructions)
        if not alone and self.active is not None:
            raise ProtocolError(
                f"the conversation has an active response, {self.active.id}; wait for response.done, or cancel it",
                "conversation_already_has_active_response",
            )
        if alone and len(self._beside) + 1 >= self._owner.settings.limits.responses:
            most = self._owner.settings.limits.responses
            raise ProtocolError(f"{most} responses of this session are under way; wait for one", "rate_limit_exceeded")
        dialogue = Dialogue(self._owner.host) if alone else self.dialogue
        self._begin(Response(self._owner, dialogue, configuration, before, question, options.metadata, not alone))

    def _read_input(self, values: list[Any]) -> list[ConversationItem]:
        """Items of a response's own input; references are looked up in the conversation."""
        items = []
        for number, value in enumerate(values):
            if isinstance(value, dict) and value.get("type") == "item_reference":
                param = f"response.input.{number}.id"
                items.append(self._owner.items.find(str(value.get("id")), "item_reference_invalid_item_id", param))
            else:
                items.append(read_item(value, self._owner.longest, f"response.input.{number}"))
        return items

    def _begin(self, response: Response) -> None:
        owner = self._owner
        if response.conversation:
            self.duck(False)
            self.last = response
            owner.items.add(response.item)
        else:
            self._beside.add(response)
        owner.send({"type": "response.created", "response": response.shown("in_progress")})
        most = owner.settings.limits.key_events
        limit = {"name": "requests", "limit": most, "remaining": most, "reset_seconds": 60.0}
        owner.send({"type": "rate_limits.updated", "rate_limits": [limit]})
        owner.spawn(self._run(response))

    async def _run(self, response: Response) -> None:
        try:
            await response.run()
        finally:
            if not response.conversation:
                self._beside.discard(response)
                await response.dialogue.close()
        if response.conversation:
            self._owner.metrics.answers.labels(response.status).inc()
            self._owner.metrics.sent_underruns.inc(response.outlet.underruns)
            self._owner.answered()
            if self._waits:
                (endpointing,), self._waits = self._waits, ()
                self.respond_to_turn(endpointing)

    def respond_to_turn(self, endpointing: float | None) -> None:
        """Answer the turn that was just committed, so many seconds after the end of speech, or once the answer under way has
        ended."""
        if self.active is not None:
            self._waits = (endpointing,)
            return
        before, question = turns_of(self._owner.items)
        if question is not None:
            configuration = self._owner.configuration
            self._begin(Response(self._owner, self.dialogue, configuration, before, question, endpointing=endpointing))

    def listen(self, semantic: bool) -> Callable[[], Coroutine[Any, Any, Any]] | None:
        """How the engine listens to what somebody begins to say, and to where it ends (`semantic`); None while an answer or
        another question is under way, or where the engine has no use for it."""
        owner, configuration = self._owner, self._owner.configuration
        if self.active is not None or configuration.type != "realtime" or not owner.host.listens:
            return None
        before, question = turns_of(owner.items)
        if question is not None and not question.part.silent:
            return None
        spoken = speaks(owner, configuration)
        options, task = options_of(owner, configuration, spoken), task_of(configuration, True, spoken)
        return lambda: self.dialogue.listen(before, task, options, semantic)

    def duck(self, on: bool) -> None:
        """Have the answer softer, or as loud as before: by the page, which does it at once, or by what is sent."""
        if self.ducked == on or self.last is None:
            return
        self.ducked = on
        if self._owner.wants_omni and self._owner.transport.sound_in_events:
            self._owner.send({"type": "omni.ducked", "active": on})
        else:
            self.last.outlet.soft = on

    async def interrupt(self, reason: StopReason = "turn_detected") -> None:
        """Stops the answer that plays, and cuts the history to what was heard of it."""
        response = self.last
        if response is None:
            return
        if not response.over.is_set():
            await response.stop(reason)
        elif response.outlet.ahead() > 0:
            heard = response.outlet.heard
            response.outlet.clear()
            await self.cut(response.item, heard)

    async def cancel(self, response_id: str | None) -> None:
        """Cancel the response of that id, or the conversation's; ProtocolError where it is not under way."""
        under_way = [response for response in (self.active, *self._beside) if response is not None]
        matches = [response for response in under_way if response_id in (None, response.id)]
        if not matches:
            named = f" {response_id[:80]!r}" if response_id else ""
            raise ProtocolError(f"Cancellation failed: no active response{named} found", "response_cancel_not_active")
        await matches[0].stop("client_cancelled")

    async def clear_output(self) -> None:
        if self._owner.transport.sound_in_events:
            raise ProtocolError(
                "output_audio_buffer.clear is for WebRTC; cancel the response and truncate its item", "invalid_event"
            )
        await self.interrupt("client_cancelled")

    async def cut(self, item: ConversationItem, heard: float) -> None:
        """Cut an answer in the history to the seconds that were heard, and its transcript with it."""
        if item.answer is None or (item.heard is not None and heard >= item.heard):
            return
        item.heard = heard
        await self.dialogue.cut(item, heard)
        item.status = "incomplete"
        item.content[0].text = item.answer.text or ""

    async def close(self) -> None:
        """End the conversation with the engine, and what no response has ended itself."""
        for response in (self.last, *self._beside):
            if response is not None:
                response.end()
                response.outlet.free()
        await self.dialogue.close()
