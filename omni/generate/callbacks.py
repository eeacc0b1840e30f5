"""Answers whose events go to a function: each answer has a thread of its own, which takes them and calls it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from omni.generate.incoming import Withdrawn
from omni.generate.listener import Listened
from omni.generate.results import Ended, Event, Timings

LOG = logging.getLogger(__name__)


class Started:
    """An answer under way, whose events go to a function; `Session.start` makes it.

    The function is called in a thread of this answer, and never twice at once: with each event in order, `Ended` last. One that
    does not return holds nothing but its own answer. One that raises ends it: `wait` returns `Ended("error")`, the conversation
    continues as if the question had not been asked, and the function is not called again.

    Args:
        session: an `omni.generate.conversation.Conversation`.
        read: reads the question and asks it; called in the thread.
    """

    def __init__(self, session: Any, read: Callable[[], Listened], on_event: Callable[[Event], object]) -> None:
        self._session, self._read, self._on_event = session, read, on_event
        self._running: Listened | None = None
        self._ended: Ended | None = None
        self._failure: BaseException | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="omni-listener", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the function has returned from the last event."""
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> Ended | None:
        """Wait until the function has returned from the last event; returns the end, or None after `timeout` seconds.

        Raises:
            UserError: of a question whose sound was still coming when it was asked.
            Exception: the engine failed, or the iterator of sound did.
        """
        if not self._over.wait(timeout):
            return None
        if self._failure is not None:
            raise self._failure
        return self._ended

    def cancel(self, played_seconds: float | None = None, shown_characters: int | None = None) -> None:
        """`Session.cancel`, unless the session has been asked another question since."""
        self._session.cancel_last(self._running, played_seconds, shown_characters)

    def _run(self) -> None:
        try:
            self._ended = self._follow()
        except Exception as error:
            LOG.error("an answer failed: %s: %s", type(error).__name__, error)
            self._failure = error
        finally:
            self._over.set()

    def _follow(self) -> Ended:
        try:
            running = self._running = self._read()
        except Withdrawn:
            ended = Ended("cancelled", Timings())
            self._call(ended)
            return ended
        ended = Ended("cancelled", Timings())
        for event in self._session.events_of(running):
            if isinstance(event, Ended):
                ended = event
            if (error := self._call(event)) is not None:
                self._session.break_off(running, error)
                return Ended("error", running.timings(), error)
        return ended

    def _call(self, event: Event) -> str | None:
        """Call the function; returns the error of one that raised."""
        try:
            self._on_event(event)
        except BaseException as error:  # also what would end the program: this is the answer's own thread
            text = f"the listener raised {type(error).__name__}: {error}"
            LOG.error("%s; its answer has ended", text, exc_info=LOG.isEnabledFor(logging.DEBUG))
            return text
        return None
