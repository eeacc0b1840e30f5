"""Sessions: what ends an answer for want of room, and that neither weights nor neighbours are touched."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from omni.errors import UserError
from omni.generate.options import GREEDY
from omni.generate.results import AudioChunk, Ended, TextDelta
from omni.generate.sampling import Sampling
from omni.generate.session import Session
from omni.generate.speech_lm import SpeechLM
from omni.layout import Layout
from omni.model.speech_model import SpeechModel
from omni.tasks import Turn, example
from omni.text import Tokenizer
from tests.generate.conftest import LAYOUTS, make_lm
from tests.generate.session_toys import ASKED, WARM, inside, plain_hidden


@pytest.mark.sampled(2)
@pytest.mark.parametrize("assist", [False, True])
def test_a_full_cache_ends_the_turn_and_refuses_the_next(layout: Layout, assist: bool) -> None:
    lm = make_lm(layout)
    with lm.session(context=30, text_assist=assist) as session:
        events = list(session.ask("hello there", "T1A2"))  # 14 columns of question
        assert isinstance(events[-1], Ended)
        steps = events[-1].timings.steps
        assert events[-1].reason == "cache" and steps == 30 - 14 + 1  # the last column is written, but not fed
        with pytest.raises(UserError, match=r"has 30 and an answer needs some: use overflow='forget'"):
            session.ask("more", "T1A2")
        assert len(session.turns) == 1
        free = lm.generate("hello there", "T1A2", text_assist=assist, max_seconds=2.0)
        assert tuple(session.turns[0].text or ()) == free.tokens[: len(session.turns[0].text or ())] != ()
    with lm.session(context=14) as session, pytest.raises(UserError, match="shorten the question, or give a larger context"):
        session.ask("hello there", "T1A2")  # 14 positions
    with pytest.raises(UserError, match="603 positions.*shorten"):
        lm.generate("x" * 600, "T1T2", context=100_000)
    answer = make_lm(layout, context=40).generate("hi", "T1T2", max_tokens=500)
    assert answer.ended == "cache" and answer.timings.steps == 40 - 5 + 1


@pytest.mark.sampled(1)
def test_a_system_message_is_before_every_question_and_never_forgotten(layout: Layout, begun: list[tuple[Tensor, int]]) -> None:
    lm, ids = make_lm(layout), tuple(Tokenizer.bytes().encode("be brief"))
    with lm.session(context=64, overflow="forget", sampling=WARM, max_seconds=0.6, system=" be brief\n") as session:
        lengths = []
        for turn in range(6):
            events = session.ask(*ASKED[turn % 5])
            kept = session.turns
            assert not kept or kept[0].system == ids
            next(events)
            assert inside(session)._last is not None
            asked = inside(session)._last.exchange.turn
            expected = plain_hidden(lm, kept, asked if kept else replace(asked, system=ids))
            torch.testing.assert_close(begun[-1][0], expected, rtol=1e-4, atol=1e-5)
            list(events)
            lengths.append(len(session.turns))
        assert max(lengths) < 6 and not any(turn.system for turn in session.turns[1:])


def test_a_history_needs_room_for_its_system_message_too() -> None:
    lm = make_lm(LAYOUTS["pad"])
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    lm.session(history=history, context=12).close()
    with pytest.raises(UserError, match="the history takes 21 positions, but the session's cache has 12"):
        lm.session(history=history, context=12, system="be brief")
    lm.session(context=5, system="be brief").close()  # nothing was said, and the first question is refused


def test_limits_end_an_answer(lm: SpeechLM) -> None:
    spoken = lm.generate("hello", "T1A1", max_seconds=0.2)
    assert spoken.ended == "length" and spoken.codes is not None and spoken.codes.shape[1] == 5
    assert spoken.audio is not None and len(spoken.audio) == 20
    written = lm.generate("hello", "T1T2", max_tokens=6)
    assert written.ended == "length" and len(written.tokens) == 7 - 1 + (written.timings.steps - 6)


def transcript(session: Session, turns: list[int]) -> Iterator[tuple[str, Any]]:
    for turn in turns:
        for event in session.ask(*ASKED[turn]):
            if isinstance(event, TextDelta):
                yield "text", event.text
            elif isinstance(event, AudioChunk):
                yield "sound", event.samples.tolist()
            else:
                yield "end", event.reason


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sampling", [GREEDY, WARM])
def test_two_interleaved_sessions_equal_two_solo_ones(chatty: SpeechLM, sampling: Sampling) -> None:
    kwargs: dict[str, Any] = {"sampling": sampling, "max_seconds": 0.6, "max_tokens": 15}
    solo = []
    for seed, turns, assist in ((1, [0, 1, 2], False), (2, [1, 4], True)):
        with chatty.session(seed=seed, text_assist=assist, **kwargs) as session:
            solo.append(list(transcript(session, turns)))
    one, two = chatty.session(seed=1, **kwargs), chatty.session(seed=2, text_assist=True, **kwargs)
    running = [transcript(one, [0, 1, 2]), transcript(two, [1, 4])]
    got: list[list[Any]] = [[], []]
    while any(running):
        for i, events in enumerate(running):
            if events is not None and (event := next(events, None)) is not None:
                got[i].append(event)
            else:
                running[i] = None  # type: ignore[call-overload]
    assert got == solo


def one_step_of_training(model: SpeechModel, optimizer: torch.optim.Optimizer) -> None:
    columns = example(model.layout, [Turn("T1T2", question=(1, 2, 3), text=(4, 5, 6))])
    logits = model.decoder.text_logits(model(columns.tokens[None]))[0]
    loss = F.cross_entropy(logits, columns.targets[-1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("assist", [False, True])
@pytest.mark.untrained("encoder.*", "projector.*", "*head.weight")
def test_a_session_leaves_weights_and_training_alone(layout: Layout, assist: bool) -> None:
    lm = make_lm(layout)
    twin = copy.deepcopy(lm.model)
    models = (lm.model, twin)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        one_step_of_training(model, optimizer)
    before = {name: value.clone() for name, value in lm.model.state_dict().items()}
    random_state = torch.get_rng_state()
    with lm.session(sampling=WARM, max_seconds=0.5, max_tokens=9, text_assist=assist) as session:
        for turn in range(5):
            list(session.ask(*ASKED[turn]))
        events = session.ask(*ASKED[0])
        next(events)  # and one that is left in the middle
        assert torch.is_grad_enabled()  # for whoever takes the events
    assert torch.is_grad_enabled() and torch.equal(torch.get_rng_state(), random_state)
    after = lm.model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    for model, optimizer in zip(models, optimizers, strict=True):
        one_step_of_training(model, optimizer)
    for (name, mine), (_, theirs) in zip(lm.model.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name
