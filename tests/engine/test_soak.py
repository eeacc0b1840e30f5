"""Ten thousand conversations that connect, ask, cancel and drop at random leave nothing behind."""

from __future__ import annotations

import gc
import os
import random
import threading

import psutil
import pytest

from omni.errors import BusyError
from omni.generate.speech_lm import SpeechLM
from tests.generate.conftest import LAYOUTS, make_lm
from tests.generate.session_toys import ASKED, TALKATIVE
from tests.soon import soon

CYCLES, THREADS = 10_000, 4


def cycle(lm: SpeechLM, chance: random.Random) -> None:
    """One conversation: some turns, each read to its end, cancelled after some events, or left; then closed or dropped."""
    options = {"pace": chance.choice(["read", "live"]), "when_full": "refuse", "text_assist": chance.random() < 0.2}
    session = lm.session(sampling=TALKATIVE, seed=chance.randrange(9), max_seconds=0.24, max_tokens=8, context=200, **options)
    for _ in range(chance.randrange(3)):
        try:
            events = session.ask(*chance.choice(ASKED))
        except BusyError:
            break
        cut = chance.choice([0, 1, 3, 50])
        for taken, _ in enumerate(events, 1):
            if taken > cut:
                break
        if chance.random() < 0.5:
            session.cancel()
    if chance.random() < 0.5:
        session.close()


@pytest.mark.long
def test_ten_thousand_conversations_leave_slots_threads_descriptors_and_memory() -> None:
    lm = make_lm(LAYOUTS["pad"])
    engine = lm.start_engine(slots=6, context=200)
    process = psutil.Process()

    done: list[int] = []

    def run(seed: int, number: int) -> None:
        chance = random.Random(seed)
        for _ in range(number):
            cycle(lm, chance)
        done.append(number)

    def play(number: int, seed: int) -> tuple[int, int, int]:
        """Conversations in threads; then bytes, descriptors and threads once all have gone."""
        threads = [threading.Thread(target=run, args=(seed + i, number // THREADS), daemon=True) for i in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gc.collect()
        assert soon(lambda: engine.stats().free == 6) and engine.stats().sessions == 0 and engine.stats().active == 0
        return process.memory_info().rss, len(os.listdir("/proc/self/fd")), threading.active_count()

    rss, files, threads = play(CYCLES // 10, 0)  # memory that is used at all
    for part in range(9):
        now = play(CYCLES // 10, 100 * (part + 1))
        assert now[1:] == (files, threads)
    assert now[0] <= 1.05 * rss and sum(done) == CYCLES
    assert lm.generate(*ASKED[0], context=200, max_tokens=3).timings.steps > 0
