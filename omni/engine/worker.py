"""A thread that does an object's work."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable


class Worker:
    """Calls a method again and again in a thread of its own.

    The first `wake` starts the thread. It holds no reference to the method's object while it waits, and ends once that is gone;
    no sooner, since cuDNN's plans are a thread's own (PyTorch's Conv_v8.cpp) and take a second to make.

    Args:
        work: does a piece of work; returns 0.0 to be called again, the seconds by which to be called again, or None to wait
            for the next `wake`."""

    def __init__(self, name: str, work: Callable[[], float | None]) -> None:
        self.name = name
        self._work = weakref.WeakMethod(work, self._end)
        self._signal = threading.Condition(threading.RLock())
        self._asked = self._stopping = False
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Have the method called, now or as soon as its present call returns."""
        with self._signal:
            self._asked = True
            if self._thread is None and not self._stopping:
                _RUNNING.add(self)
                self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                self._thread.start()
            self._signal.notify_all()

    def stop(self) -> None:
        """End the thread after its present piece of work, and wait for that."""
        self._end()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _end(self, _: object = None) -> None:
        """Have the thread end after its present piece of work. A finalizer may call it, in any thread."""
        with self._signal:
            self._stopping = True
            self._signal.notify_all()

    @property
    def here(self) -> bool:
        """Whether the caller is this thread."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        while True:
            work = self._work()
            wait = work() if work is not None else None
            del work
            if wait == 0.0 and not self._stopping:
                continue
            with self._signal:
                if not (self._asked or self._stopping):
                    self._signal.wait(wait)
                if self._stopping:
                    self._thread = None
                    _RUNNING.discard(self)
                    return
                self._asked = False


_RUNNING: set[Worker] = set()


@atexit.register
def _stop_all() -> None:
    """Ends all threads at exit, before the interpreter clears its modules."""
    for worker in list(_RUNNING):
        worker.stop()
