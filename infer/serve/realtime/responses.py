"""The responses of a session: how they begin, are interrupted, and are cut in the history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infer.serve.host import EngineHost
from infer.serve.realtime import protocol
from infer.serve.realtime.configuration import BETA, Configuration, check_modalities, updated
from infer.serve.realtime.dialogue import Dialogue, prompted, turns_of
from infer.serve.realtime.input_buffer import TurnSound
from infer.serve.realtime.items import ConversationItem, read_item
from infer.serve.realtime.playback import Owner
from infer.serve.realtime.protocol import Event, ProtocolError
from infer.serve.realtime.response import Response, ResponseRequest, StopReason, options_of, speaks, task_of

CHANGEABLE = ("instructions", "output_modalities", "audio", "max_output_tokens", "tools", "tool_choice", "omni")
"""Fields of the configuration that `response.create` may change for its response."""


class Responses:
    """The responses of one session: those of its conversation, one after another (`last`), and those beside it.

    Attributes:
        ducked: the sound of the last is softer, because somebody speaks.
    """

    def __init__(self, owner: Owner, host: EngineHost) -> None:
        self.last: Response | None = None
        self.ducked = False
        self._owner, self._host = owner, host
        self._dialogue = Dialogue(host)
        self._beside: set[Response] = set()
        self._waiting: ResponseRequest | None = None  # a turn that came during an answer that it does not interrupt

    @property
    def active(self) -> Response | None:
        """The conversation's response that is under way."""
        return self.last if self.last is not None and not self.last.over.is_set() else None

    @property
    def playing(self) -> bool:
        """Whether an answer is heard, or about to be."""
        return self.active is not None or (self.last is not None and self.last.outlet.ahead() > 0)

    async def create(self, event: protocol.ResponseCreate) -> None:
        if self._owner.configuration.type == "transcription":
            raise ProtocolError("a transcription session writes down what it hears and answers nothing", "invalid_session_type")
        overrides = event.response or {}
        configuration = self._configured(overrides)
        alone = overrides.get("conversation") == "none"
        if overrides.get("conversation") not in (None, "auto", "none"):
            shown = repr(overrides["conversation"])[:60]
            raise ProtocolError(f"response.conversation is {shown}; use 'auto' or 'none'", param="response.conversation")
        items = self._read_input(overrides["input"]) if overrides.get("input") is not None else list(self._owner.items)
        before, question = turns_of(items)
        question = question or prompted(items, overrides.get("instructions") or "", configuration.instructions)
        request = ResponseRequest(configuration, before, question, not alone, _metadata(overrides.get("metadata")))
        if not alone and self.active is not None:
            raise ProtocolError(
                f"the conversation has an active response, {self.active.id}; wait for response.done, or cancel it",
                "conversation_already_has_active_response",
            )
        if alone and len(self._beside) + 1 >= self._owner.settings.limits.responses:
            most = self._owner.settings.limits.responses
            raise ProtocolError(f"{most} responses of this session are under way; wait for one", "rate_limit_exceeded")
        self.respond(request)

    def _configured(self, overrides: Event) -> Configuration:
        """The session's configuration with what a response changes."""
        change = {name: overrides[name] for name in (*CHANGEABLE, *BETA) if overrides.get(name) is not None}
        if isinstance(change.get("audio"), dict):
            change["audio"] = {"output": change["audio"].get("output") or {}}
        try:
            configuration = updated(self._owner.configuration, change, started=True)
        except ProtocolError as error:
            param = (error.param or "").replace("session", "response", 1)
            raise ProtocolError(str(error).replace("session.", "response."), error.code, param) from None
        check_modalities(configuration.output_modalities, "response.output_modalities")
        return configuration

    def _read_input(self, values: Any) -> list[ConversationItem]:
        """Items of a response's own input; references are looked up in the conversation."""
        if not isinstance(values, list):
            raise ProtocolError("response.input must be a list of items", param="response.input")
        items = []
        for number, value in enumerate(values):
            if isinstance(value, dict) and value.get("type") == "item_reference":
                param = f"response.input.{number}.id"
                items.append(self._owner.items.find(str(value.get("id")), "item_reference_invalid_item_id", param))
            else:
                items.append(read_item(value, self._owner.longest, f"response.input.{number}"))
        return items

    def respond(self, request: ResponseRequest) -> None:
        """Begin a response."""
        if not request.conversation:
            dialogue = Dialogue(self._host)
            beside = Response(self._owner, dialogue, request)
            self._beside.add(beside)
            beside.announce()
            self._owner.spawn(self._run_beside(beside, dialogue))
            return
        self.duck(False)
        self.last = Response(self._owner, self._dialogue, request)
        self._owner.items.add(self.last.item)
        self.last.announce()
        self._owner.spawn(self._run(self.last))

    async def _run(self, response: Response) -> None:
        await response.run()
        self._owner.metrics.answered(response.status, response.outlet.underruns)
        self._owner.answered()
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self.respond_to_turn(waiting.endpointing)

    async def _run_beside(self, response: Response, dialogue: Dialogue) -> None:
        try:
            await response.run()
        finally:
            self._beside.discard(response)
            await dialogue.close()

    def respond_to_turn(self, endpointing: float | None) -> None:
        """Answer the turn that was just committed, or once the answer under way has ended."""
        before, question = turns_of(self._owner.items)
        request = ResponseRequest(self._owner.configuration, before, question, endpointing=endpointing)
        if self.active is not None:
            self._waiting = request
        elif question is not None:
            self.respond(request)

    def listen(self, semantic: bool) -> TurnSound | None:
        """Listen to what somebody begins to say, and where it ends (`semantic`); None while an answer or another question is
        under way, or where the engine has no use for it."""
        owner, configuration = self._owner, self._owner.configuration
        if self.active is not None or configuration.type != "realtime" or not self._host.listens:
            return None
        before, question = turns_of(owner.items)
        if question is not None and not question.part.silent:
            return None
        spoken = speaks(owner, configuration)
        options, task = options_of(owner, configuration, spoken), task_of(configuration, True, spoken)
        turn = TurnSound(lambda: self._dialogue.listen(before, task, options, semantic))
        owner.spawn(turn.begin())
        return turn

    def duck(self, on: bool) -> None:
        """Have the answer softer, or as loud as before: by the page, which does it at once, or by what is sent."""
        if self.ducked == on or self.last is None:
            return
        self.ducked = on
        if self._owner.wants_omni and self._owner.transport.sound_in_events:
            self._owner.send({"type": "omni.ducked", "active": on})
        else:
            self.last.outlet.duck(on)

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

    async def cancel(self, event: protocol.ResponseCancel) -> None:
        under_way = [response for response in (self.active, *self._beside) if response is not None]
        matches = [response for response in under_way if event.response_id in (None, response.id)]
        if not matches:
            named = f" {event.response_id[:80]!r}" if event.response_id else ""
            raise ProtocolError(f"Cancellation failed: no active response{named} found", "response_cancel_not_active")
        await matches[0].stop("client_cancelled")

    async def clear_output(self, event: protocol.OutputClear) -> None:
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
        await self._dialogue.cut(item, heard)
        item.status = "incomplete"
        item.content[0].text = item.answer.text or ""

    async def save(self, path: Path) -> None:
        """Write the conversation's history, where it has a turn, as `Session.save`."""
        await self._dialogue.save(path)

    def silence(self) -> None:
        """Send nothing more of any response: the client is gone."""
        for response in (self.last, *self._beside):
            if response is not None:
                response.silence()

    async def close(self) -> None:
        """End the conversation with the engine, and what no response has ended itself."""
        for response in (self.last, *self._beside):
            if response is not None:
                response.end()
                response.outlet.free()
        await self._dialogue.close()


def _metadata(value: Any) -> dict[str, str] | None:
    """A response's metadata; ProtocolError where it is none."""
    if value is None:
        return None
    texts = isinstance(value, dict) and all(isinstance(k, str) and isinstance(v, str) for k, v in value.items())
    if not texts or len(value) > 16 or any(len(k) > 64 or len(v) > 512 for k, v in value.items()):
        raise ProtocolError(
            "response.metadata must have at most 16 texts of at most 512 characters, under names of at most 64",
            param="response.metadata",
        )
    return dict(value)
