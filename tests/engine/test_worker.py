"""A worker's thread serves its object as long as that lives, and no longer."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from omni.engine.worker import Worker
from tests.soon import soon


class Owner:
    """Keeps the threads that worked, and may drop the last reference to itself while it works."""

    def __init__(self, wait: float | None) -> None:
        self.threads: list[threading.Thread] = []
        self.kept: list[Owner] = []
        self.wait = wait
        self.worker = Worker("omni-test", self._turn)

    def _turn(self) -> float | None:
        self.threads.append(threading.current_thread())
        self.kept.clear()
        return self.wait


def worked(owner: Owner, times: int) -> None:
    assert soon(lambda: len(owner.threads) >= times)


@pytest.mark.parametrize("wait", [None, 0.01])
def test_one_thread_for_a_life(wait: float | None) -> None:
    owner = Owner(wait)
    for times in (1, 2, 3):
        owner.worker.wake()
        worked(owner, times)
        time.sleep(0.05)
    (thread,) = set(owner.threads)
    assert thread.is_alive() and owner.worker._thread is thread
    del owner
    thread.join(20)
    assert not thread.is_alive()


def test_it_ends_where_its_own_work_drops_the_object() -> None:
    owner, seen = Owner(None), []
    owner.kept.append(owner)
    owner.threads, worker = seen, owner.worker
    gc.disable()  # which would drop the object before its work does
    try:
        del owner
        worker.wake()
        soon(lambda: seen)
    finally:
        gc.enable()
    seen[0].join(20)
    assert not seen[0].is_alive() and worker._thread is None


def test_stopped_it_is_joined_and_wakes_no_more() -> None:
    owner = Owner(None)
    owner.worker.wake()
    worked(owner, 1)
    owner.worker.stop()
    assert not owner.threads[0].is_alive()
    owner.worker.wake()
    assert owner.worker._thread is None
