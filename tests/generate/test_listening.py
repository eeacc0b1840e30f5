"""Law 14 in conversations: a question that was heard while it came is answered and remembered as the same question whole."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from omni.config import ProjectorConfig
from omni.edit.deltas import Delta, Edits
from omni.encoder.whisper_config import WhisperConfig
from omni.engine import entering
from omni.engine.engine import Engine
from omni.engine.listen import Listens
from omni.engine.slots import Slots
from omni.errors import SoundWarning, UserError
from omni.generate.feature_stream import FeatureStream
from omni.generate.question import Asked, encode_questions
from omni.generate.results import Clock, Ended
from omni.generate.session import Session
from omni.generate.speech_lm import SpeechLM
from omni.lora.attach import activate, add_adapter
from omni.lora.config import LoRAConfig
from omni.tasks import Turn, find_task
from tests.close import assert_near
from tests.generate.conftest import LAYOUTS, SHAPES, make_lm
from tests.generate.session_toys import TALKATIVE

ENCODER = WhisperConfig(width=16, heads=2, layers=2, window_seconds=3.0, mode="chunked", long_audio="split", chunk_ms=160)
CHUNK = 4
"""Features of a chunk: 8 frames, two of which make one."""

TALK: dict[str, Any] = {"sampling": TALKATIVE, "max_seconds": 0.4, "max_tokens": 12}
QUESTIONS: list[tuple[Any, str]] = []


def sound(seconds: float, seed: int = 0) -> Tensor:
    return torch.randn(round(seconds * 16_000), generator=torch.Generator().manual_seed(seed)) * 0.1


QUESTIONS += [
    (sound(1.03), "A1A2"),
    ("and?", "T1A2"),
    (sound(0.12, 1), "A1T2"),
    (sound(3.61, 2), "A1A2"),
    (sound(0.5, 3), "A1T1"),
]


def listener(layout: str = "pad", **shape: Any) -> SpeechLM:
    return make_lm(LAYOUTS[layout], **{"encoder": ENCODER} | shape)


@pytest.fixture
def lm() -> Iterator[SpeechLM]:
    lm = listener()
    yield lm
    lm.engine.close()


def pieces(clip: Tensor, most: int = 5000, seed: int = 0) -> Iterator[Tensor]:
    draw, at = random.Random(seed), 0
    while at < len(clip):
        size = draw.choice([0, 1, draw.randrange(most)])
        yield clip[at : at + size]
        at += size


def wait_until_heard(lm: SpeechLM) -> None:
    """Wait until the engine has encoded and fed all that came."""
    requests, end = lm.engine._requests, time.monotonic() + 20
    while requests.refills._waiting or any(
        each.stream._lock.locked() or each.stream.due or each.ready for each in requests.listens.open()
    ):
        assert time.monotonic() < end, "what came was not heard"
        time.sleep(0.001)


def heard(lm: SpeechLM, session: Session, question: Any, task: str, wait: bool, **options: Any) -> Any:
    """The answer to a question that is pushed in pieces, where it is sound."""
    if not isinstance(question, Tensor):
        return session.answer(question, task)
    listening = session.listen(task)
    for number, piece in enumerate(pieces(question, seed=len(question))):
        listening.push(piece)
        if wait and number % 4 == 0:
            wait_until_heard(lm)
    if wait:
        wait_until_heard(lm)
    return session.answer(listening, task, **options)


def same(one: Any, other: Any) -> None:
    assert (one.text, one.tokens, one.ended, one.error) == (other.text, other.tokens, other.ended, other.error)
    assert (one.codes is None) == (other.codes is None) and (one.codes is None or one.codes.equal(other.codes))


def same_cache(lm: SpeechLM, one: Session, other: Session) -> None:
    """Both rows hold the same columns, and keys and values of them."""
    wait_until_heard(lm)
    runner, (a, b) = lm.engine.runner, (one._seat, other._seat)
    assert runner is not None and a is not None and b is not None and a.slot is not None and b.slot is not None
    assert [(*key[:-2], key[-1]) for key in a.held.keys] == [(*key[:-2], key[-1]) for key in b.held.keys]
    cache, low = runner.cache, 0 if runner.cache.window is None else len(a.held.keys) - runner.cache.window
    rows = [cache.positions[slot, : cache.slots] for slot in (a.slot, b.slot)]
    wanted = [(row >= low) & (row < len(a.held.keys)) for row in rows]
    assert wanted[0].equal(wanted[1]) and int(wanted[0].sum()) == len(a.held.keys) - max(low, 0)
    for memory in (*cache.keys, *cache.values):
        assert_near(memory[a.slot, : cache.slots][wanted[0]], memory[b.slot, : cache.slots][wanted[1]], 1e-4)


def same_history(one: Session, other: Session) -> None:
    for a, b in zip(one.history, other.history, strict=True):
        assert (a.role, a.text, a.tokens, a.cut, a.seconds) == (b.role, b.text, b.tokens, b.cut, b.seconds)
        assert (a.codes is None) == (b.codes is None) and (a.codes is None or a.codes.equal(b.codes))
    for x, y in zip(one._past, other._past, strict=True):
        assert (x.clip is None) == (y.clip is None) and (x.clip is None or y.clip is None or x.clip.equal(y.clip))
        if x.features is not None and y.features is not None:
            assert_near(x.features, y.features, 1e-5)


def equal_conversations(lm: SpeechLM, wait: bool, turns: int = 7, **options: Any) -> None:
    with lm.session(**TALK | options) as one, lm.session(**TALK | options) as other:
        for turn in range(turns):
            question, task = QUESTIONS[turn % len(QUESTIONS)]
            same(heard(lm, one, question, task, wait), other.answer(question, task))
            same_cache(lm, one, other)
            same_history(one, other)


# --- the law --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_heard_while_it_comes_equals_the_whole(layout: str, shape: str, wait: bool) -> None:
    equal_conversations(listener(layout, **SHAPES[shape]), wait)


@pytest.mark.parametrize("cores", [1, 64])
def test_whoever_encodes_the_rest(lm: SpeechLM, monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """The stepping thread, or who asks; of what was heard, of what came too fast to be heard, and of nothing."""
    monkeypatch.setattr("omni.engine.hearing.cores", lambda: cores)
    equal_conversations(lm, False, turns=5)
    equal_conversations(lm, True, turns=5)
    advance = FeatureStream.advance
    for most in (0, 1, 3):  # chunks that the engine finds time for before the end
        count = [0]

        def some(self: FeatureStream, count: list[int] = count, most: int = most) -> bool:
            if threading.current_thread().name == "omni-engine" and count[0] < most:
                count[0] += 1
                return advance(self)
            return False

        with lm.session(**TALK) as session, lm.session(**TALK) as other:
            listening = session.listen()
            listening.push(sound(2.0))
            with monkeypatch.context() as patch:
                patch.setattr(FeatureStream, "advance", some)
                end = time.monotonic() + 0.3
                while count[0] < most and time.monotonic() < end:
                    time.sleep(0.001)
                assert count[0] == most
            same(session.answer(listening), other.answer(sound(2.0)))
            same_cache(lm, session, other)


def test_the_time_counts_from_the_question_s_end(lm: SpeechLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    started: list[bool] = []

    def coming() -> Iterator[Tensor]:
        yield sound(1.0)
        ended.append(True)

    class Watched(Clock):
        def __init__(self, *values: Any) -> None:
            started.append(bool(ended))
            super().__init__(*values)

    monkeypatch.setattr("omni.generate.conversation.Clock", Watched)
    with lm.session(**TALK) as session:
        timings = session.answer(coming()).timings
    assert started == [True] and 0 < timings.encode <= timings.prefill <= (timings.first_audio or 0)


@pytest.mark.parametrize("stack", [1, 3])
def test_frames_that_fill_no_feature_are_held_back(stack: int) -> None:
    projector = ProjectorConfig("gated", hidden=24, stack=stack)
    equal_conversations(listener(projector=projector), True, turns=4)


@pytest.mark.parametrize("options", [{"text_assist": True}, {"system": "be brief"}, {"context": 200, "overflow": "forget"}])
@pytest.mark.parametrize("shape", SHAPES)
def test_with_options_of_the_conversation(options: dict[str, Any], shape: str) -> None:
    equal_conversations(listener(**SHAPES[shape]), True, turns=11, **options)


def test_with_adapters_and_edits() -> None:
    lm = listener()
    torch.manual_seed(1)
    add_adapter(lm.model, LoRAConfig(("decoder.blocks.*", "encoder.*"), rank=2), "warm")
    with torch.no_grad():
        for name, p in lm.model.named_parameters():
            if ".lora." in name:
                p.normal_(std=0.2)
    activate(lm.model)
    delta = Delta(torch.randn(1, lm.config.decoder.width), torch.randn(1, 48))
    edits = Edits({"decoder.blocks.1.mlp.down": delta})
    with lm.session(adapter="warm", edits=edits, **TALK) as one, lm.session(adapter="warm", edits=edits, **TALK) as other:
        for turn in range(5):
            same(heard(lm, one, *QUESTIONS[turn], wait=True), other.answer(*QUESTIONS[turn]))
        same_cache(lm, one, other)
    with lm.session(adapter="warm", **TALK) as one, lm.session(**TALK) as other:
        assert heard(lm, one, *QUESTIONS[0], wait=True).tokens != other.answer(*QUESTIONS[0]).tokens


def test_an_adapter_that_changes_meanwhile_has_the_whole_encoded_again(lm: SpeechLM) -> None:
    with lm.session(**TALK) as session, lm.session(**TALK) as other:
        listening = session.listen()
        listening.push(QUESTIONS[0][0][:10_000])
        wait_until_heard(lm)
        add_adapter(lm.model, LoRAConfig(("encoder.*",), rank=2), "late")
        activate(lm.model)
        listening.push(QUESTIONS[0][0][10_000:])
        same(session.answer(listening), other.answer(QUESTIONS[0][0]))
        same_cache(lm, session, other)


def test_a_projector_that_is_gated_by_task() -> None:
    lm = listener(projector=ProjectorConfig("mmoe", stack=2, settings={"experts": 2}))
    equal_conversations(lm, True, turns=5)
    with lm.session(**TALK) as session, lm.session(**TALK) as other:  # and one that is asked as another task
        listening = session.listen("A1T2")
        listening.push(QUESTIONS[0][0])
        wait_until_heard(lm)
        same(session.answer(listening, "A1A2"), other.answer(QUESTIONS[0][0], "A1A2"))
        same_cache(lm, session, other)


@pytest.mark.parametrize("rate", [8_000, 24_000, 44_100])
def test_other_rates_types_and_two_channels(lm: SpeechLM, rate: int) -> None:
    mono = (sound(1.2) * 20_000).to(torch.int16)
    for question in (mono, torch.stack([mono, mono // 2]), torch.stack([mono, -mono])):  # the last cancel each other
        with lm.session(**TALK) as session, lm.session(**TALK) as other, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", SoundWarning)
            listening = session.listen(sample_rate=rate)
            for piece in question.split(701, dim=-1):
                listening.push(piece)
            wait_until_heard(lm)
            same(session.answer(listening), other.answer(question, sample_rate=rate))
            assert len(told) == 2 * (question is not mono and int(question.sum()) == 0)
            (one,), (two,) = session._past, other._past
            assert one.clip is not None and two.clip is not None
            torch.testing.assert_close(one.clip, two.clip, rtol=1e-6, atol=1e-6)


def test_iterators_are_heard_by_every_face(lm: SpeechLM) -> None:
    question = QUESTIONS[0][0]
    with lm.session(**TALK) as session:
        wanted = session.answer(question)
    heard_in: list[int] = []
    encode = FeatureStream._encode

    def watched(self: FeatureStream, samples: int, last: bool = False) -> None:
        heard_in.append(samples)
        encode(self, samples, last)

    def coming() -> Iterator[Tensor]:
        for piece in question.split(2_000):
            yield piece
            wait_until_heard(lm)

    async def coming_async() -> AsyncIterator[Tensor]:
        for piece in coming():
            await asyncio.sleep(0)
            yield piece

    async def events_of(session: Session, asked: Any) -> str:
        return "".join([getattr(event, "text", "") async for event in session.ask_async(asked)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FeatureStream, "_encode", watched)
        faces: list[Callable[[Session], Any]] = [
            lambda s: s.answer(coming()).text,
            lambda s: "".join(getattr(event, "text", "") for event in s.ask(coming())),
            lambda s: asyncio.run(s.answer_async(coming())).text,
            lambda s: asyncio.run(s.answer_async(coming_async())).text,
            lambda s: asyncio.run(events_of(s, coming_async())),
        ]
        for face in faces:
            heard_in.clear()
            with lm.session(**TALK) as session:
                assert face(session) == wanted.text
                assert heard_in == [2560] * 6 + [len(question) - 6 * 2560]
                found: list[Any] = []
                ended = session.start(coming(), on_event=found.append).wait(20)
                assert ended is not None and ended.reason == wanted.ended


# --- how much is left -----------------------------------------------------------------------------------------------------


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Columns that were left to prefill, of each question."""
    found, pack = [], entering.pack

    def watched(layout: Any, columns: Any, features: Any, starts: Any) -> Any:
        found.append(len(columns[0]) - starts[0])
        return pack(layout, columns, features, starts)

    monkeypatch.setattr(entering, "pack", watched)
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{}, {"context": 200, "overflow": "forget"}])
def test_only_the_last_chunk_and_the_markers_are_left(left: list[int], options: dict[str, Any], shape: str) -> None:
    lm = listener(**SHAPES[shape])
    with lm.session(**TALK | options) as session:
        for turn in range(6):
            heard(lm, session, sound(0.3 + 0.37 * turn, turn), "A1A2", wait=True)
            assert left[-1] <= CHUNK + 2, turn


def test_so_it_is_after_a_history_that_nobody_heard(lm: SpeechLM, left: list[int]) -> None:
    with lm.session(**TALK) as first:
        for question, task in QUESTIONS:
            first.answer(question, task)
        history = first.history
    with lm.session(history=history, **TALK) as session, lm.session(history=history, **TALK) as other:
        listening = session.listen()
        wait_until_heard(lm)  # the history is fed as soon as somebody speaks
        listening.push(sound(0.5))
        wait_until_heard(lm)
        same(session.answer(listening), other.answer(sound(0.5)))
        assert left[-2] <= CHUNK + 2 < left[-1]


def test_so_it_is_after_an_answer_that_was_interrupted_while_it_came(lm: SpeechLM, left: list[int]) -> None:
    long = TALK | {"max_seconds": 30.0, "max_tokens": 500, "pace": "live"}
    with lm.session(**long) as session, lm.session(**long) as other:
        for one in (session, other):
            events = one.ask(sound(0.4))
            for _ in range(5):
                next(events)
            listening = one.listen() if one is session else None
            if listening is not None:
                listening.push(sound(1.0, 4)[:9_000])
            one.cancel(0.1)
            if listening is not None:
                listening.push(sound(1.0, 4)[9_000:])
                wait_until_heard(lm)
            events = one.ask(sound(1.0, 4) if listening is None else listening)
            next(events)
            one.cancel()
        assert left[1] <= CHUNK + 2 < left[3]
        assert session.turns[0].text == other.turns[0].text


# --- what was no question -------------------------------------------------------------------------------------------------


def test_a_sound_that_is_dropped_leaves_nothing(lm: SpeechLM) -> None:
    with lm.session(**TALK) as session, lm.session(**TALK) as other:
        for turn in range(4):
            listening = session.listen()
            listening.push(sound(2.0, 10 + turn))  # as long as the question that follows, or longer
            wait_until_heard(lm)
            if turn % 2:
                listening.drop()
                listening.drop()
                with pytest.raises(UserError, match="this sound was dropped"):
                    listening.push(sound(0.1))
                with pytest.raises(UserError, match="this sound was dropped"):
                    session.ask(listening)
            before = session.turns
            assert len(before) == turn
            same(heard(lm, session, *QUESTIONS[turn], wait=bool(turn % 3)), other.answer(*QUESTIONS[turn]))
            same_cache(lm, session, other)
            same_history(session, other)
    assert not lm.engine._requests.listens.open()


def test_a_written_question_meanwhile(lm: SpeechLM) -> None:
    with lm.session(**TALK) as session, lm.session(**TALK) as other:
        listening = session.listen()
        listening.push(QUESTIONS[0][0][:9_000])
        wait_until_heard(lm)
        same(session.answer("go on", "T1A2"), other.answer("go on", "T1A2"))
        listening.push(QUESTIONS[0][0][9_000:])
        wait_until_heard(lm)
        same(session.answer(listening), other.answer(QUESTIONS[0][0]))
        same_cache(lm, session, other)


def test_a_sound_is_asked_again_and_by_its_own_session(lm: SpeechLM) -> None:
    with lm.session(**TALK) as session, lm.session(**TALK) as other:
        listening = session.listen()
        listening.push(sound(0.7))
        with pytest.raises(UserError, match="another session"):
            other.ask(listening)
        with pytest.raises(UserError, match="asks in writing"):
            session.ask(listening, "T1A2")
        for task in ("A1A2", "A1T2"):
            same(session.answer(listening, task), other.answer(sound(0.7), task))
        same_cache(lm, session, other)
        with pytest.raises(UserError, match="this sound was asked"):
            listening.push(sound(0.1))
        with pytest.raises(UserError, match="asks in writing"):
            session.listen("T1A2")


def test_a_session_that_is_dropped_is_freed(lm: SpeechLM) -> None:
    session = lm.session(**TALK)
    listening = session.listen()
    listening.push(sound(1.0))
    wait_until_heard(lm)
    gone = weakref.ref(session)
    del session, listening
    gc.collect()
    assert gone() is None and not lm.engine._requests.listens.open()
    with lm.session(**TALK) as other:
        assert other.answer(sound(0.3)).ended in ("end", "length")


# --- streams that stall, and ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_a_stream_that_stalls_blocks_nobody(lm: SpeechLM, end: str) -> None:
    stalled, on = threading.Event(), threading.Event()

    def coming() -> Iterator[Tensor]:
        yield sound(1.0)
        stalled.set()
        assert on.wait(20)
        yield sound(0.1)
        raise AssertionError

    found: list[Any] = []
    session = lm.session(**TALK)
    thread = threading.Thread(target=lambda: found.extend(session.ask(coming())))
    thread.start()
    assert stalled.wait(20)
    with lm.session(**TALK) as other:
        for question, task in QUESTIONS:
            assert other.answer(question, task).ended in ("end", "length")
    getattr(session, end)()
    assert not lm.engine._requests.listens.open()
    on.set()
    thread.join(20)
    assert not thread.is_alive() and [event.reason for event in found] == ["cancelled"]
    if end == "cancel":
        assert not session.turns and session.answer(sound(0.4)).ended in ("end", "length")
    session.close()


def test_a_task_that_is_cancelled_while_sound_comes(lm: SpeechLM) -> None:
    async def coming() -> AsyncIterator[Tensor]:
        yield sound(1.0)
        await asyncio.sleep(30)

    async def run() -> None:
        for delay in (0.0, 0.001, 0.05):
            task = asyncio.create_task(session.answer_async(coming()))
            await asyncio.sleep(delay)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        same(await session.answer_async(sound(0.4)), wanted)

    with lm.session(**TALK) as session:
        wanted = session.answer(sound(0.4))
    with lm.session(**TALK) as session:
        asyncio.run(run())
        assert len(session.turns) == 1 and not lm.engine._requests.listens.open()


@pytest.mark.parametrize("close", ["session", "engine"])
def test_pushing_after_the_end(lm: SpeechLM, close: str) -> None:
    session = lm.session(**TALK)
    listening = session.listen()
    listening.push(sound(1.0))
    session.close() if close == "session" else lm.engine.close()
    with pytest.raises(UserError, match=f"this {close} is closed"):
        listening.push(sound(1.0))
    with pytest.raises(UserError, match=f"this {close} is closed"):
        session.ask(listening)
    with pytest.raises(UserError, match=f"this {close} is closed"):
        session.listen()
    listening.drop()
    session.close()


# --- bad sound ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunked", [True, False])
def test_bad_pieces(chunked: bool) -> None:
    lm = listener() if chunked else make_lm(LAYOUTS["pad"])
    with lm.session(**TALK) as session:
        listening = session.listen(sample_rate=16_000)
        for bad, text in (
            ([0.0, float("nan")], "piece 1 of the question holds samples that are not finite"),
            ("text", "piece 2 of the question is a str"),
            ([1e4], "piece 3 of the question has a sample of"),
            (np.broadcast_to(np.float32(0.1), 57_600_000), "with its piece 4 and is still coming"),
            (torch.zeros(3, 50), "3 channels"),
        ):
            with pytest.raises(UserError, match=text):
                listening.push(bad)
        for good in (torch.zeros(0), [], np.zeros(0, np.int16), [0.1], sound(0.3)):
            listening.push(good)
        for bad, text in (([1], "piece 11 of the question is int64"), (torch.zeros(2, 50), "numbers of two channels, and")):
            with pytest.raises(UserError, match=text):
                listening.push(bad)
        assert listening.seconds == pytest.approx(0.3, abs=1e-3)
        whole = torch.cat([torch.tensor([0.1]), sound(0.3)])
        with lm.session(**TALK) as other:
            same(session.answer(listening), other.answer(whole))
        empty = session.listen()
        with pytest.raises(UserError, match="without a piece of sound"):
            session.ask(empty)
        empty.push([])
        with pytest.raises(UserError, match="gave 1 pieces without samples"):
            session.ask(empty)
        for rate in (0, 1.5, "16000"):
            with pytest.raises(UserError, match="sample rate"):
                session.listen(sample_rate=rate)  # type: ignore[arg-type]
        assert len(session.turns) == 1


def test_a_single_sample_and_one_sample_at_a_time(lm: SpeechLM) -> None:
    for question in (sound(1 / 16_000), sound(0.2)):
        with lm.session(**TALK) as session, lm.session(**TALK) as other, warnings.catch_warnings():
            warnings.simplefilter("ignore", SoundWarning)
            same(session.answer(iter(question.split(1))), other.answer(question))


@pytest.mark.parametrize("last", [False, True])
def test_pieces_of_two_channels_of_any_length(lm: SpeechLM, last: bool) -> None:
    question = torch.stack([sound(0.5), sound(0.5, 1)])
    with lm.session(**TALK) as session, lm.session(**TALK) as other:
        listening, at = session.listen(), 0
        for size in (5, 0, 1, 2, 3, 1, 2, 10_000):
            piece = question[:, at : at + size]
            listening.push(piece.T if last else piece)
            at += size
        same(session.answer(listening), other.answer(question))


def test_features_that_are_not_finite_end_one_answer(lm: SpeechLM) -> None:
    weight = lm.model.encoder.whisper.ln_post.weight  # type: ignore[union-attr]
    with lm.session(**TALK) as session, lm.session(**TALK) as other:
        same(heard(lm, session, *QUESTIONS[0], wait=True), other.answer(*QUESTIONS[0]))
        with torch.no_grad():
            kept = weight[0].item()
            weight[0] = float("nan")
        listening = session.listen()
        listening.push(sound(1.0))
        wait_until_heard(lm)
        answer = session.answer(listening)
        assert answer.ended == "error" and "not finite" in str(answer.error) and len(session.turns) == 1
        with torch.no_grad():
            weight[0] = kept
        same(heard(lm, session, *QUESTIONS[3], wait=True), other.answer(*QUESTIONS[3]))
        same_cache(lm, session, other)


def test_a_model_without_a_streaming_encoder_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = make_lm(LAYOUTS["pad"])
    monkeypatch.setattr(Engine, "listen", lambda self, listen: pytest.fail("the engine listens"))
    with lm.session(**TALK) as session, lm.session(**TALK) as other:
        for question, task in QUESTIONS:
            same(heard(lm, session, question, task, wait=False), other.answer(question, task))
            same_history(session, other)


# --- the features -----------------------------------------------------------------------------------------------------------


def test_features_of_a_stream_are_those_of_the_whole(lm: SpeechLM) -> None:
    for clip in (sound(3.61), sound(0.16), sound(0.17), sound(1 / 16_000), sound(6.5)):
        stream = FeatureStream(lm.model, "A1A2")
        for piece in pieces(clip):
            stream.push(piece)
            while stream.due:
                assert stream.advance()
        (whole,) = encode_questions(lm.model, [Asked(Turn(find_task("A1A2"), features=1), clip)])
        found = stream.finish()
        assert whole is not None and (found is not None or len(clip) < 2560)
        if found is not None:
            assert_near(found, whole, 1e-5)
            assert stream.finish() is found and stream.sound.equal(clip)


def test_listens_take_turns(lm: SpeechLM) -> None:
    listens = Listens()
    with lm.session() as one, lm.session() as two:
        for session in (one, two):
            session._listen = lambda: None  # type: ignore[method-assign]
        from omni.engine.listen import Listen

        seats = [one._seat, two._seat]
        every = [Listen(seat, FeatureStream(lm.model, "A1A2"), ()) for seat in seats if seat is not None]
        for each in every:
            listens.put(each)
        assert listens.open() == every
        listens.later(every[0])
        assert listens.open() == every[::-1]
        every[0].stream.closed = True
        assert listens.open() == [every[1]]
        listens.drop(every[1].seat)
        listens.later(every[1])
        assert not listens.open()


# --- slots ------------------------------------------------------------------------------------------------------------------


def test_slots_are_taken_where_they_are_idle_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = listener()
    lm._engine = Engine(lm.model, slots=2, context=300)
    options = TALK | {"context": 300}
    with lm.session(**options) as one, lm.session(**options) as two, lm.session(**options) as three:
        one.answer(sound(0.3))
        two.answer(sound(0.3, 1))
        a, b = one.listen(), two.listen()
        for listening in (a, b):
            listening.push(sound(1.0))
        wait_until_heard(lm)
        held = [session._seat.slot for session in (one, two, three)]  # type: ignore[union-attr]
        assert sorted(held[:2]) == [0, 1] and held[2] is None  # type: ignore[type-var]
        c = three.listen()
        c.push(sound(1.0, 2))
        end = time.monotonic() + 5
        while c._sound.known < 6 * CHUNK:  # it is encoded, and has no slot: the others are listened to
            assert time.monotonic() < end
            time.sleep(0.001)
        time.sleep(0.02)
        assert three._seat is not None and three._seat.slot is None
        b.drop()
        c.push(sound(0.2, 3))
        end = time.monotonic() + 5
        while three._seat.slot is None:
            assert time.monotonic() < end
            time.sleep(0.001)
        assert two._seat is not None and two._seat.slot is None
        answers = [one.answer(a), two.answer(sound(0.4)), three.answer(c)]
    for questions, found in zip(
        ([sound(0.3), sound(1.0)], [sound(0.3, 1), sound(0.4)], [torch.cat([sound(1.0, 2), sound(0.2, 3)])]),
        answers,
        strict=True,
    ):
        with lm.session(**options) as alone:
            for question in questions:
                wanted = alone.answer(question)
            same(found, wanted)
    lm.engine.close()


def test_a_cache_does_not_grow_while_somebody_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = listener()
    grown: list[int] = []
    grow = Slots.grow
    monkeypatch.setattr(Slots, "grow", lambda self, number: (grown.append(number), grow(self, number))[1])
    with lm.session(**TALK | {"max_seconds": 60.0, "max_tokens": 10**4, "pace": "read"}) as one, lm.session(**TALK) as two:
        events = one.ask(sound(0.3))
        next(events)
        before = len(grown)
        listening = two.listen()
        listening.push(sound(1.0))
        while listening._sound.due:
            next(events)
        for _ in range(20):
            next(events)
        if two._seat is not None and two._seat.slot is None:
            assert len(grown) == before
        one.cancel()
        assert isinstance(list(events)[-1], Ended)
        with lm.session(**TALK) as alone:
            same(two.answer(listening), alone.answer(sound(1.0)))


def test_history_of_a_heard_question_is_saved(lm: SpeechLM, tmp_path: Any) -> None:
    with lm.session(**TALK) as session:
        heard(lm, session, *QUESTIONS[0], wait=True)
        session.save(tmp_path / "talk")
        with lm.session(history=tmp_path / "talk", **TALK) as other:
            same_history(session, other)
            assert replace(session.turns[0], codes=None) == replace(other.turns[0], codes=None)
