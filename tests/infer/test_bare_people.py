"""The bare loop that answers people beside the engine: it does the model's work, and people talk to it as to the engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from infer.bench.live.bare_people import BarePeople
from infer.bench.live.manner import Heard, Manner
from infer.bench.random_model import random_lm
from infer.bench.streaming import noise
from omni.generate.question import Asked, encode_questions
from omni.generate.speech_lm import SpeechLM
from omni.model.decoder import Hidden
from tests.infer.conftest import TINY


def model() -> SpeechLM:
    config = replace(TINY, decoder=replace(TINY.decoder, qk_norm=True, post_layers=1))
    return random_lm(config, torch.device("cpu"), torch.float32)


def manner(**own: object) -> Manner:
    return replace(Manner(noise(0.05), 0.4, 0.0, False), **own)


@torch.inference_mode()
def test_rows_do_the_work_of_the_model() -> None:
    """Three answers of different ages, of which the first leaves: hidden states are those of their whole columns."""
    lm = model()
    people = BarePeople(lm, manner(), 3, context=64)
    found: list[tuple[Tensor, Tensor]] = []
    write = people._write

    def watched(text: Tensor, audio: Tensor, rows: slice) -> None:
        found.append((text, audio))
        write(text, audio, rows)

    people._write = watched  # type: ignore[method-assign]
    fed: dict[int, list[Tensor]] = {}
    (features,) = encode_questions(lm.model, [Asked(people._asked.turn, people._asked.clip)])
    assert features is not None

    def step() -> None:
        before = people._tokens.clone()
        rows = [row.person for row in people._rows]
        for n, person in enumerate(rows):
            fed[person].append(before[n])
        people._step()
        text, audio = found[-1]
        for n, person in enumerate(rows):
            columns = torch.cat([people._prompt[0], *fed[person]], 1)[None]
            index = torch.cat([people._index, torch.full((len(fed[person]),), -1)])[None]
            wanted: Hidden = lm.model.decoder(columns, features, index)
            torch.testing.assert_close(text[n], wanted.text[0, -1:], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(audio[n], wanted.audio[0, -1:], rtol=1e-4, atol=1e-4)

    for count in (1, 2):
        for person in range(len(fed), len(fed) + count):
            people._pending.append((0.0, person))
            fed[person] = []
        people._enter()
        for _ in range(3):
            step()
    people._leave(people._rows[0])
    assert [row.person for row in people._rows] == [2, 1]
    step()


@pytest.mark.few(1)
@pytest.mark.parametrize("barge_in", [0.0, 1.0])
def test_people_ask_hear_and_interrupt(barge_in: float) -> None:
    people = BarePeople(model(), manner(barge_in=barge_in), 3, context=32)
    heard = people.heard = Heard()
    passed: list[float] = []
    active, frames = 0.0, round(0.4 * people.codec.frame_rate)
    for _ in range(20):  # of which two are enough where nothing else runs
        active = people.play(1.5, passed.append)
        if len(heard.first_audio) >= 3 and (heard.interrupted if barge_in else heard.answers):
            break
    assert heard.questions >= len(heard.first_audio) >= 3 and active > 0 and len(passed) >= 2
    if barge_in:
        assert heard.interrupted > 0
    else:
        assert heard.answers > 0 and heard.interrupted == 0 and len(heard.lateness) >= heard.answers * (frames - 2)
    assert heard.underruns == sum(late > 0 for late in heard.lateness)


def test_a_conversation_that_forgets_is_fed_what_stays() -> None:
    """As in `omni.generate.history.fit`: the newest turns of at most a quarter of the row, or one where it leaves room."""
    people = BarePeople(model(), manner(), 2, context=64)
    question = len(people._index)
    wanted: list[tuple[list[int], list[int]]] = [
        ([], []),
        ([48 - question], [48 - question]),
        ([20, 29 - question], [29 - question]),
        ([30, 7, 7, 7], [7, 7]),
        ([40, 40], [40] if 40 + question <= 48 else []),
        ([60], []),
    ]
    for turns, kept in wanted:
        assert people._kept(turns) == kept
    people._turns[0], people._pending = [30, 7, 7, 7], [(0.0, 0), (0.0, 1)]
    people._enter()
    assert [(row.person, row.position) for row in people._rows] == [(0, 14 + question)] and people._pending == [(0.0, 1)]
    people._enter()
    people._leave(people._rows[0])
    assert people._turns == [[7, 7, question + 1], []] and people._rows[0].position == question
