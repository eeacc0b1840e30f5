"""A client's conversation with the engine: from items to a session whose history is what they say.

The engine's session follows the items by itself while turns are asked and cut one after another. Where a client has changed
the items (deleted, inserted, cut an older answer, left a question without an answer), or the options or the engine are others,
the next question begins a session over a history that is made of the items.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infer.pcm import PCM_RATE
from infer.serve.host import EngineHost
from infer.serve.realtime.configuration import Configuration
from infer.serve.realtime.state import ContentPart, ConversationItem, SessionState
from omni.errors import EngineLost, UserError
from omni.generate.answer_stream import AnswerStream
from omni.generate.history import Message

BAD_MESSAGE = re.compile(r"history: message (\d+)\b")
"""The engine's error about a history: the number of the message that it cannot take."""

Mark = tuple[str, int, str | None, int]
"""Identifies a turn: the question's item and part, and its answer's item and version (None and 0 for one without)."""


PROMPT = ("", 0)  # begin of the mark of a turn without a question of the user's


@dataclass(frozen=True)
class DialogueTurn:
    """A question, and the answer that it has."""

    part: ContentPart
    mark: Mark
    answer: ConversationItem | None = None

    @property
    def spoken(self) -> bool:
        return self.part.sound is not None

    def messages(self) -> list[Any]:
        """The turn for a session's history; a question without an answer was interrupted before any of it was heard."""
        content: Any = self.part.text
        if self.part.sound is not None:
            content = {"array": self.part.sound, "sampling_rate": PCM_RATE}
        question = {"role": "user", "content": content}
        if self.answer is None:
            task = "A1A2" if self.spoken else "T1A2"
            return [question, Message("assistant", "", cut=True, task=task)]
        if self.answer.answer is not None:
            return [question, self.answer.answer]
        return [question, {"role": "assistant", "content": "".join(part.text or "" for part in self.answer.content)}]


def turns_of(items: Iterable[ConversationItem]) -> tuple[list[DialogueTurn], DialogueTurn | None]:
    """The turns that were answered, or left without an answer, and the last question where it has none yet.

    System messages and function calls are no turns; nor is an answer without a question or a prompt before it, a question that
    the model cannot take, with its answer, or one in which nobody speaks, but as the last.
    """
    turns: list[DialogueTurn] = []
    for item in items:
        if item.role == "user":
            for number, part in enumerate(item.content):
                if part.sound is not None or part.forgotten or (part.type == "input_text" and (part.text or "").strip()):
                    turns.append(DialogueTurn(part, (item.id, number, None, 0)))
        elif item.prompt is not None:
            turns.append(DialogueTurn(item.prompt, (*PROMPT, item.id, item.version), item))
        elif item.role == "assistant" and turns and turns[-1].answer is None:
            last = turns[-1]
            turns[-1] = replace(last, mark=(*last.mark[:2], item.id, item.version), answer=item)
    turns = [turn for turn in turns if not turn.part.refused and (turn is turns[-1] or not turn.part.silent)]
    if turns and turns[-1].answer is None and not turns[-1].part.forgotten:
        return turns[:-1], turns[-1]
    return turns, None


def prompted(items: Sequence[ConversationItem], own: str, instructions: str) -> DialogueTurn | None:
    """A written turn to be answered where there is no question, as a greeting is: a response's own instructions, or system
    messages since the last turn, or the session's instructions; None without any."""
    texts: list[str] = []
    for item in reversed(items):
        if item.role == "user":  # it could not be answered
            instructions = ""
        if item.role in ("user", "assistant"):
            break
        texts[:0] = [part.text or "" for part in item.content]
    text = own or "\n".join(texts) or instructions
    return DialogueTurn(ContentPart("input_text", text), (*PROMPT, None, 0)) if text.strip() else None


def speaks(owner: SessionState, configuration: Configuration) -> bool:
    """Whether answers are spoken."""
    return owner.voices.speaks and configuration.output_modalities == ["audio"]


def task_of(configuration: Configuration, spoken: bool, speaks: bool) -> str:
    """Name of the task (`omni.tasks`) of a question."""
    if configuration.omni.task == "transcribe" and spoken:
        return "A1T1"
    return f"{'A' if spoken else 'T'}1{'A' if speaks else 'T'}2"


def options_of(owner: SessionState, configuration: Configuration, speaks: bool) -> dict[str, Any]:
    """Keywords of the engine's session."""
    answering = owner.settings.answering
    most = None if configuration.max_output_tokens == "inf" else configuration.max_output_tokens
    options = answering.keywords(speaks, most, temperature=configuration.omni.temperature)
    options["adapter"] = owner.voices.adapter(configuration.audio.output.voice)
    options["system"] = configuration.instructions if answering.use_instructions else ""
    return options


class Dialogue:
    """One conversation; `engine` is that which was asked last."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._session: Any = None
        self.engine: Any = None
        self._options: dict[str, Any] = {}
        self._marks: list[Mark] = []
        self._lock = asyncio.Lock()

    async def ask(
        self,
        before: Sequence[DialogueTurn],
        question: DialogueTurn,
        answer: ConversationItem,
        task: str,
        options: dict[str, Any],
    ) -> AnswerStream:
        """Ask a question after the turns before it; its events are those of the result. `answer` is the item that is going to
        be the answer, `options` are keywords of `SpeechLM.session`. UserError of the engine, also EngineLost."""
        async with self._lock:
            session, before = await self._session_for(before, options)
            self._marks = [turn.mark for turn in before] + [(*question.mark[:2], answer.id, answer.version)]
            part = question.part
            content: Any = part.text
            if part.sound is not None:
                turn, part.turn = part.turn, None
                heard = None if turn is None else turn.heard(session, part.sound)
                content = part.sound if heard is None else heard
            return session.ask(content, task, sample_rate=PCM_RATE)

    async def listen(self, before: Sequence[DialogueTurn], task: str, options: dict[str, Any], semantic: bool) -> Any:
        """Listen to a question after the turns before it, while it comes, and to where it ends (`semantic`); arguments and
        errors as of `ask`."""
        async with self._lock:
            session, before = await self._session_for(before, options)
            self._marks = [turn.mark for turn in before]
            return await asyncio.to_thread(session.listen, task, sample_rate=PCM_RATE, turn=semantic)

    async def _session_for(self, before: Sequence[DialogueTurn], options: dict[str, Any]) -> tuple[Any, Sequence[DialogueTurn]]:
        """The session that has these turns as its history, and those of them that the model can take.

        One that has answered the turns before is kept: it has those whose sound is forgotten here, or has dropped them itself.
        """
        engine = self._host.engine
        turns = [turn for turn in before if not turn.part.refused]
        wanted = [turn.mark for turn in turns]
        if self._session is not None and self.engine is engine and self._options == options and self._marks == wanted:
            return self._session, turns
        await self._drop()
        known = [turn for turn in turns if not turn.part.forgotten]
        while True:
            history = [message for turn in known for message in turn.messages()]
            try:
                self._session = await opened(engine, history=history or None, pace="live", overflow="forget", **options)
                break
            except UserError as error:
                bad = BAD_MESSAGE.match(str(error))
                if bad is None:
                    raise
                refused = known.pop((int(bad[1]) - 1) // 2)  # or no later question would be answered
                refused.part.refused = True
                turns.remove(refused)
        self.engine, self._options = engine, options
        return self._session, turns

    async def queue_position(self) -> int:
        """Position of the last question among those that wait for room, from 1; 0 where it does not wait."""
        position: int = await asyncio.to_thread(lambda: self._session.place) if self._session is not None else 0
        return position

    async def settled(self, events: AnswerStream) -> Message | None:
        """The answer of these events as the history has it; they have ended."""
        if self._session is None or events.running is None:
            return None
        answer: Message | None = await asyncio.to_thread(lambda: self._session.last_answer)
        return answer

    async def interrupt(self, events: AnswerStream, heard: float | None) -> None:
        """Stop an answer, and cut it in the history to the seconds that were heard (None for what was handed over)."""
        if events.running is None:
            await events.aclose()
        elif self._session is not None:
            await asyncio.to_thread(self._session.cancel, heard, only=events.running)

    async def cut(self, item: ConversationItem, heard: float) -> None:
        """Cut an answer that has ended to the seconds that were heard."""
        async with self._lock:
            last = self._marks[-1] if self._marks else None
            if self._session is not None and last is not None and last[2:] == (item.id, item.version):
                with contextlib.suppress(EngineLost):  # its history went with it, and is made of the items again
                    await asyncio.to_thread(self._session.cancel, heard)
                    item.answer = await asyncio.to_thread(lambda: self._session.last_answer)
                    return
        item.version += 1
        if item.answer is not None:
            item.answer = cut_message(item.answer, heard, self._host.engine.frame_rate)

    async def save(self, path: Path) -> None:
        """Write the history, where it has a turn, as `Session.save`."""
        if self._session is not None and self._session.turns:
            await asyncio.to_thread(self._session.save, path)

    def broke(self) -> None:
        """The last question was not answered: the history has nothing of it."""
        self._marks = self._marks[:-1]

    async def _drop(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await closed(session)

    async def close(self) -> None:
        """Close the engine's session, also of a lost engine."""
        async with self._lock:
            with contextlib.suppress(UserError):
                await self._drop()


async def opened(engine: Any, **options: Any) -> Any:
    """A new session of an engine, made in a thread; where the task is cancelled meanwhile it is closed again."""
    making = asyncio.get_running_loop().run_in_executor(None, lambda: engine.session(**options))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(_close_made)
        raise


def _close_made(making: asyncio.Future[Any]) -> None:
    if not making.cancelled() and making.exception() is None:
        asyncio.get_running_loop().run_in_executor(None, making.result().close)


async def closed(session: Any) -> None:
    """Close an engine's session in a thread, which also happens where the task is cancelled meanwhile."""
    await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, session.close))


def cut_message(message: Message, heard: float, frame_rate: float) -> Message:
    """A message with the first seconds of its sound, and as large a part of its words."""
    codes = message.codes
    if codes is None or not frame_rate:
        return message
    frames = min(int(heard * frame_rate + 1e-6), codes.shape[1])
    share = frames / codes.shape[1] if codes.shape[1] else 0.0
    words = (message.text or "").split(" ")
    text = " ".join(words[: int(len(words) * share)])
    return replace(message, text=text, tokens=None, codes=codes[:, :frames], seconds=frames / frame_rate, cut=True)
