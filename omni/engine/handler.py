"""What sessions say to an engine, in messages: from a question's to the conversation's end."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from omni.engine.answer import EventOutlet, Running
from omni.engine.conversation import Conversation
from omni.engine.wire import is_portable
from omni.errors import UserError
from omni.generate.answer_stream import DeliveredPart
from omni.generate.question import Asked
from omni.generate.results import Clock, Ended, Reason


class Outlets(Protocol):
    """Where answers go: a link in this process, or what sends them to another."""

    def listener(self, answer: int) -> EventOutlet:
        """Takes an answer's events."""

    def turn(self, sound: int) -> Callable[[int, Tensor], None]:
        """Takes the turn head's probabilities of a sound."""


class MessageHandler:
    """Takes the messages of sessions (`omni.generate.session.Session`), wherever these are: a method for each, which is called
    in any thread. Conversations, answers and sounds are known by numbers of the sessions' link.

    Attributes:
        conversations: the open ones; answers: those that are not settled.
    """

    def __init__(self, outlets: Outlets) -> None:
        self.conversations: dict[int, Conversation] = {}
        self.answers: dict[int, Running] = {}
        self._outlets = outlets

    def _open(self, number: int) -> Conversation:
        if number not in self.conversations:
            raise UserError("this session is closed; start a new one")
        return self.conversations[number]

    def check(self, number: int) -> None:
        """UserError where a conversation takes no question."""
        self._open(number).check()

    # --- a question ---------------------------------------------------------------------------------------------------

    def ask(self, number: int, answer: int, asked: Asked, seed: int | None, clock: Clock) -> None:
        """Answer a question; of one that was listened to, or that is still coming, `asked.heard` has the number."""
        running = self.lay_out(number, answer, asked, seed, clock)
        conversation = self._open(number)
        try:
            if conversation.gone < answer:
                conversation.begin(running)
        except BaseException:
            self.answers.pop(answer, None)
            conversation.newest = 0
            raise
        if conversation.gone >= answer and self.answers.pop(answer, None) is not None:
            conversation.let_go(running)

    def lay_out(self, number: int, answer: int, asked: Asked, seed: int | None, clock: Clock) -> Running:
        """A question's answer, not begun yet."""
        conversation, heard, known = self._open(number), None, None
        if isinstance(asked.heard, tuple):
            session, sound = asked.heard
            known = self._open(session).sound_so_far(sound)
        elif asked.heard is not None:
            heard = conversation.hears(asked.heard)
            assert heard is not None
            asked = replace(asked, clip=heard.sound)
        outlet = self._outlets.listener(answer)
        running = conversation.lay_out(replace(asked, heard=known), seed, clock, outlet, heard)
        portable = running.codec is not None and is_portable(running.codec) and running.reply.limits.silence is None
        running.coded = outlet.decodes and portable and running.task.audio  # a limit of silence is listened to here
        conversation.newest, self.answers[answer] = answer, running
        return running

    def listen(self, number: int, sound: int, task: str, turn: bool) -> None:
        """Listen to a conversation's next question; with `turn` to where it ends, too."""
        self._open(number).open_sound(sound, task, self._outlets.turn(sound) if turn else None)

    def hear(self, number: int, sound: int, samples: Tensor, peek: bool) -> None:
        """See `Conversation.hear`."""
        if (conversation := self.conversations.get(number)) is not None:
            conversation.hear(sound, samples, peek)

    def drop_sound(self, number: int, sound: int) -> None:
        """Listen no more."""
        if (conversation := self.conversations.get(number)) is not None:
            conversation.drop_sound(sound)

    # --- its answer ---------------------------------------------------------------------------------------------------

    def taken(self, number: int, answer: int, taken: int, late: Sequence[float] = ()) -> None:
        """Count events as delivered, and note how late sound was that was decoded elsewhere."""
        if (running := self.answers.get(answer)) is not None:
            running.take(taken)
        if late and (conversation := self.conversations.get(number)) is not None:
            conversation.late(late)

    def stop(self, number: int, answer: int, taken: int, reason: Reason, error: str | None) -> None:
        """End an answer whose listener waits for its end."""
        if (running := self.answers.get(answer)) is not None:
            running.take(taken)
            running.stop(reason, error)

    def let_go(self, number: int, answer: int, taken: int) -> None:
        """Settle an answer that nobody listens to, without waiting."""
        running, conversation = self._closed(number, answer, taken), self.conversations.get(number)
        if running is not None and conversation is not None:
            conversation.let_go(running)

    def settle(self, number: int, answer: int, taken: int) -> Ended | None:
        """Put an answer into the history as far as it was taken; returns its end where it was under way."""
        running, conversation = self._closed(number, answer, taken), self.conversations.get(number)
        if running is None or conversation is None:
            return None
        conversation.settle(running)
        return running.end()

    def interrupt(self, number: int, answer: int, taken: int, played: float | None, shown: int | None) -> Ended | None:
        """Settle an answer, and cut it where it was interrupted."""
        running, conversation = self._closed(number, answer, taken), self._open(number)
        if conversation.newest == answer:
            conversation.interrupt(played, shown)
        return None if running is None else running.end()

    def withdraw(self, number: int, answer: int, taken: int) -> Ended | None:
        """Go on as if a question had not been asked."""
        running, conversation = self._closed(number, answer, taken), self.conversations.get(number)
        if conversation is not None and conversation.newest == answer:
            assert conversation._last is not None
            conversation.withdraw(conversation._last)
            conversation.newest = 0
        return None if running is None else running.end()

    def _closed(self, number: int, answer: int, taken: int) -> Running | None:
        """An answer that is under way no more; None where it was closed before, or was not asked yet."""
        if (conversation := self.conversations.get(number)) is not None:
            conversation.gone = max(conversation.gone, answer)
        self.taken(number, answer, taken)
        return self.answers.pop(answer, None)

    def delivered(self, number: int, answer: int) -> DeliveredPart:
        """The delivered part of a conversation's last answer, where that is the one."""
        conversation = self._open(number)
        return conversation.delivered() if conversation.newest == answer else DeliveredPart()

    # --- the conversation ---------------------------------------------------------------------------------------------

    def read(self, number: int, name: str) -> Any:
        """A property of a conversation."""
        return getattr(self._open(number), name)

    def save(self, number: int, path: str | os.PathLike[str]) -> None:
        """Write a conversation as a file."""
        self._open(number).save(path)

    def close(self, number: int) -> None:
        """End a conversation, whose history can still be read."""
        if (conversation := self.conversations.get(number)) is not None:
            conversation.close()
            self.answers.pop(conversation.newest, None)

    def abandon(self, number: int) -> None:
        """End a conversation whose session nobody has any more; waits for nobody."""
        if (conversation := self.conversations.pop(number, None)) is not None:
            conversation.abandon()
            self.answers.pop(conversation.newest, None)
