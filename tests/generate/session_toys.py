"""Questions to ask in sessions, and the state that an answer must start from, by a plain forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omni.engine.conversation import Conversation
from omni.generate.results import Answer
from omni.generate.sampling import Sampling
from omni.generate.session import Session
from omni.generate.speech_lm import SpeechLM
from omni.tasks import Turn, answer, join, prompt
from tests.generate.conftest import features_of, tone
from tests.soon import soon

WARM = Sampling(1.0, top_k=50)
TALKATIVE = Sampling(1.0, top_k=3)  # an end is seldom among the three likeliest, so answers go on for some frames
CLIPS = [tone(0.3), tone(0.4, 330.0), tone(0.2, 500.0)]
ASKED: list[tuple[Any, str]] = [
    (CLIPS[0], "A1A2"), ("and then?", "T1A2"), (CLIPS[1], "A1T2"), ("say", "T1A1"), (CLIPS[2], "A1A2")
]  # fmt: skip


async def answered(session: Any, *asked: Any) -> Answer:
    """The whole answer to a question, awaited."""
    async with session.ask(*asked) as stream:
        events = [event async for event in stream]
    whole: Answer = session.whole(events, stream.running)
    return whole


def inside(session: Session) -> Conversation:
    """A session's conversation in the engine of this process."""
    conversation: Conversation = session.link.conversations[session.number]  # type: ignore[attr-defined]
    return conversation


def equal(one: Answer, other: Answer) -> bool:
    """Whether two answers say the same."""
    codes = one.codes is other.codes or (one.codes is not None and other.codes is not None and one.codes.equal(other.codes))
    return (one.text, one.tokens) == (other.text, other.tokens) and codes


def same(one: Answer, other: Answer) -> None:
    """Assert that two answers say the same and end the same."""
    assert (one.text, one.tokens, one.ended, one.error) == (other.text, other.tokens, other.ended, other.error)
    assert equal(one, other)


def is_free(lm: SpeechLM) -> bool:
    """Whether all slots are let go within some seconds."""
    slots = lm.engine._batch.slots
    return soon(lambda: not any(slots.holders), 5)


def plain_hidden(lm: SpeechLM, history: tuple[Turn, ...], question: Turn) -> Tensor:
    """The state after the question, by a plain forward over the offline layout of the history and the prompt."""
    pieces = [piece for turn in history for piece in (prompt(lm.layout, turn), answer(lm.layout, turn))]
    columns = join([*pieces, prompt(lm.layout, question)])
    clips = {lm.config.features(len(clip)): clip for clip in CLIPS}
    features = features_of(lm.model, [clips[turn.features] for turn in (*history, question) if turn.features])
    with torch.no_grad():
        whole = torch.cat(features) if features else None
        return lm.model(columns.tokens[None], whole, columns.feature_index[None]).audio[0, -1]
