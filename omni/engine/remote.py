"""Sessions of an engine in another process: the calls of `omni.generate.session.Session`.

Questions are read, checked and resampled here, and `stop` functions are called here. The history is in the engine's process.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from omni.config import ModelConfig
from omni.engine.answers import RemoteAnswer
from omni.engine.client import Pace
from omni.engine.link import Link
from omni.engine.wire import EngineLost, ModelFacts
from omni.errors import UserError
from omni.generate.conversation import Conversation
from omni.generate.listener import DeliveredPart, answer_of, joined
from omni.generate.messages import Message
from omni.generate.question import Asked, Coming, Question, read_question
from omni.generate.results import Answer, Clock, Ended, Event, Timings
from omni.generate.turn_end import TurnFrames
from omni.tasks import Task, Turn, find_task
from omni.text import Tokenizer


class RemoteSession(Conversation[RemoteAnswer]):
    """One conversation. Made by `EngineProcess.session`; close it (or use `with`) to free its slot.

    Args:
        number: its number in the process.
        stop: ends an answer, see `omni.generate.listener.AnswerReader`.
    """

    def __init__(
        self,
        link: Link,
        number: int,
        facts: ModelFacts,
        tokenizer: Tokenizer,
        pace: Pace,
        stop: Callable[[str], bool] | None,
    ) -> None:
        super().__init__(stop)
        self._link, self._number, self._facts, self._tokenizer, self._pace = link, number, facts, tokenizer, pace
        self._closed = False
        self._sound: int | None = None  # that is listened to there
        self._dropped = weakref.finalize(self, link.tell, "close", 0, number)
        self._dropped.atexit = False

    # --- the question -------------------------------------------------------------------------------------------------

    @property
    def config(self) -> ModelConfig:
        return self._facts.config

    @property
    def sample_rate(self) -> int:
        return self._facts.sample_rate

    def check(self) -> None:
        self._open()
        self._link.check()

    def _open(self) -> None:
        if self._closed:
            raise UserError("this session is closed; start a new one")

    def _read_question(self, question: Question | Coming, task: Task | str, sample_rate: int) -> Asked:
        model: Any = SimpleNamespace(config=self.config, layout=self.config.layout)
        return read_question(question, task, model, self._tokenizer, sample_rate)

    def lay_out(self, asked: Asked, seed: int | None = None, clock: Clock | None = None) -> RemoteAnswer:
        rate = self.sample_rate if asked.task.audio else 0
        with self._lock:
            self._open()
            self._commit(self._last)  # once more: another thread may have asked meanwhile
            answer = RemoteAnswer(self._link, self._link.number(), asked, seed, clock or Clock(), self._pace, rate)
            self._last = answer
        return answer

    def begin(self, answer: RemoteAnswer) -> None:
        asked, turn = answer.asked, replace(answer.asked.turn, task=answer.asked.task.name)
        known = asked.heard if isinstance(asked.heard, tuple) else None
        heard = self._sound if asked.heard == self._sound else None
        clip = None if asked.clip is None or heard is not None else asked.clip.numpy()
        with self._lock:
            if not answer.start():  # it was cancelled meanwhile
                return
            self._link.register(answer)
            try:
                prepared = None if asked.clip is None or heard is not None else self._prepared(asked.clip)
                values = answer.seed, answer.clock.seconds, known or heard
                self._link.request("ask", self._number, answer.number, turn, clip, prepared, *values)
                if heard is not None:
                    self._sound = None
            except Exception:  # it was refused, and nothing is left of it there
                answer.settled = True
                answer.end(Ended("cancelled", Timings()))
                raise
            except BaseException:  # Ctrl-C: it is perhaps about to be answered
                self._sound = None
                self.let_go(answer)
                raise

    def open_sound(self, task: Task, turn: TurnFrames | None = None) -> int | None:
        if self.config.encoder.chunk_samples is None:
            return None
        number = self._link.number()
        if turn is not None:
            self._link.follow(number, turn)
        self._link.request("listen", self._number, number, task.name, turn is not None)
        self._sound = number
        return number

    def hear(self, sound: int, samples: Tensor) -> None:
        if self._sound == sound:
            self._link.tell("hear", self._number, sound, samples.numpy())

    def peek(self, sound: int, samples: Tensor) -> None:
        if self._sound == sound:
            self._link.tell("peek", self._number, sound, samples.numpy())

    def sound_so_far(self, sound: int) -> tuple[int, int]:
        return self._number, sound

    def drop_sound(self, sound: int | None) -> None:
        if sound is not None and self._sound == sound:
            self._sound = None
            self._link.tell("drop_sound", self._number, sound)

    def _prepared(self, clip: Tensor) -> tuple[Any, ...]:
        """The clip's features, made here, where that delays nobody else's sound; as arrays, which are quicker to send."""
        features, *counts = self.config.encoder.prepare(clip)
        return ([part.numpy(force=True) for part in features], *counts)

    # --- its answer ---------------------------------------------------------------------------------------------------

    def whole(self, events: Iterable[Event], answer: RemoteAnswer | None) -> Answer:
        said, part = joined(events), DeliveredPart()
        if answer is not None:
            with suppress(EngineLost):
                part = self._link.request("delivered", self._number, answer.number)
        return answer_of(said, part, answer is not None and answer.rate > 0, self.sample_rate)

    async def aside(self, call: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.to_thread(call, *args)

    def withdraw(self, answer: RemoteAnswer) -> None:
        with self._lock:
            self._end(answer, "withdraw")

    def let_go(self, answer: RemoteAnswer) -> None:
        with answer.changed:
            if answer.settled:
                return
            answer.quiet()
            answer.settled = True
            if answer.started:
                self._link.tell("let_go", self._number, answer.number, answer.taken)
            answer.end(Ended("cancelled", Timings()))

    def _settle(self, answer: RemoteAnswer) -> None:
        if not answer.settled:
            self._end(answer, "settle")

    def _interrupt(self, answer: RemoteAnswer, played: float | None, shown: int | None) -> None:
        self._end(answer, "interrupt", played, shown)

    def _end(self, answer: RemoteAnswer, request: str, *interrupted: Any) -> None:
        """Have an answer settled, interrupted or withdrawn there."""
        answer.quiet()
        try:
            ended = self._link.request(request, self._number, answer.number, answer.taken, *interrupted)
        except EngineLost as error:
            if answer.settled:
                raise
            ended = Ended("error", Timings(), str(error))
        answer.end(ended or Ended("cancelled", Timings()))
        answer.settled = True

    # --- the conversation ---------------------------------------------------------------------------------------------

    @property
    def place(self) -> int:
        """See `Session.place`."""
        found: int = self._link.request("place", self._number)
        return found

    @property
    def history(self) -> list[Message]:
        """See `Session.history`."""
        found: list[Message] = self._link.request("history", self._number)
        return found

    @property
    def last_answer(self) -> Message | None:
        found: Message | None = self._link.request("last_answer", self._number)
        return found

    @property
    def turns(self) -> tuple[Turn, ...]:
        """See `Session.turns`."""
        found: tuple[Turn, ...] = self._link.request("turns", self._number)
        return tuple(replace(turn, task=find_task(turn.task)) for turn in found)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """See `Session.save`."""
        with self._lock:
            self._link.request("save", self._number, os.path.abspath(path) if isinstance(path, (str, os.PathLike)) else path)
        return Path(path)

    def close(self) -> None:
        """End the session and free its slot; from any thread. An answer under way is cancelled."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._dropped.detach()
            if self._incoming is not None:
                self._incoming.withdraw()
            if self._last is not None:
                self._settle(self._last)
            with suppress(EngineLost):  # its slot went with it
                self._link.request("close", self._number)
