"""Law 12: what sessions in many threads are answered is what each is answered alone, cancels included."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from omni.cpu import use_fast
from omni.cpu.int8 import to_int8
from omni.generate.results import AudioChunk, Ended, TextDelta
from omni.generate.speech_lm import SpeechLM
from tests.close import assert_near
from tests.generate.conftest import LAYOUTS, make_lm
from tests.generate.session_toys import ASKED, TALKATIVE

THREADS, TURNS = 20, 5


def talk(lm: SpeechLM, number: int) -> list[Any]:
    """Five turns, of which some are cut after some events; the delivered sound of each, its end, and the history."""
    out: list[Any] = []
    with lm.session(sampling=TALKATIVE, seed=number, max_seconds=0.24, max_tokens=8, text_assist=number % 5 == 4) as session:
        for turn in range(TURNS):
            events = session.ask(*ASKED[(turn + number) % len(ASKED)])
            cut = 2 + (number + turn) % 4 if (number + turn) % 3 == 0 else None
            text, sound, end = "", [torch.zeros(0)], None
            for taken, event in enumerate(events, 1):
                if isinstance(event, TextDelta):
                    text += event.text
                elif isinstance(event, AudioChunk):
                    sound.append(event.samples)
                else:
                    assert isinstance(event, Ended)
                    end = event.reason
                if taken == cut:
                    session.cancel()
            out.append((text, end, torch.cat(sound)))
        out.append([(turn.text, turn.codes, turn.cut) for turn in session.turns])
    return out


@pytest.mark.long
@pytest.mark.parametrize("numbers", ["fp32", pytest.param("int8", marks=pytest.mark.long)])
def test_twenty_threads_of_five_turns_equal_their_solo_runs(numbers: str) -> None:
    lm = make_lm(LAYOUTS["pad"])
    if numbers == "int8":
        to_int8(lm.model)
    use_fast(lm.model)  # as a model that serves
    alone = [talk(lm, number) for number in range(THREADS)]
    together: list[list[Any] | None] = [None] * THREADS

    def run(number: int) -> None:
        together[number] = talk(lm, number)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number, (one, other) in enumerate(zip(alone, together, strict=True)):
        assert other is not None, f"session {number} did not end"
        for turn, ((text, end, sound), (text2, end2, sound2)) in enumerate(zip(one[:-1], other[:-1], strict=True)):
            assert (text, end) == (text2, end2), f"session {number}, turn {turn}"
            assert_near(sound2, sound, what=f"session {number}, turn {turn}")
        for mine, theirs in zip(one[-1], other[-1], strict=True):
            assert mine[0] == theirs[0] and mine[2] == theirs[2]
            assert (mine[1] is None) == (theirs[1] is None) and (mine[1] is None or torch.equal(mine[1], theirs[1]))
    assert {end for one in alone for _, end, _ in one[:-1]} >= {"cancelled", "length"}
