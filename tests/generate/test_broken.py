"""Answers whose numbers are not finite end with an error, and nobody else ever notices: neither rows beside them, nor whoever
has their slots next, nor the turns before and after them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from omni.edit.deltas import Delta, Edits
from omni.generate.results import Answer, Ended
from omni.generate.sampling import broken_rows
from omni.generate.speech_lm import SpeechLM
from omni.lora.attach import activate, add_adapter
from omni.lora.config import LoRAConfig
from omni.text import Tokenizer
from tests.generate.conftest import LAYOUTS, EchoStream, make_lm, tone
from tests.generate.session_toys import ASKED, TALKATIVE

NAN = float("nan")
SHORT: dict[str, Any] = {"sampling": TALKATIVE, "max_seconds": 0.3, "max_tokens": 6}
DEEP = ("decoder.blocks.1.mlp.down",)


def huge_adapter(lm: SpeechLM, targets: tuple[str, ...] = DEEP) -> str:
    """An adapter that is finite, and too large for the model."""
    add_adapter(lm.model, LoRAConfig(targets, rank=2), "huge")
    with torch.no_grad():
        for name, p in lm.model.named_parameters():
            if ".lora.huge." in name:
                p.normal_().mul_(1e25)
    activate(lm.model)
    return "huge"


def huge_edits(lm: SpeechLM) -> Edits:
    linear = lm.model.get_submodule(DEEP[0])
    torch.manual_seed(1)
    return Edits({DEEP[0]: Delta(1e25 * torch.randn(2, linear.out_features), 1e25 * torch.randn(2, linear.in_features))})


def said(answer: Answer) -> tuple[Any, ...]:
    listed = [None if x is None else x.tolist() for x in (answer.codes, answer.audio)]
    return answer.text, answer.tokens, listed, answer.ended, answer.error


def broke(answer: Answer) -> bool:
    return answer.ended == "error" and answer.error is not None and "not finite" in answer.error


def poison(lm: SpeechLM) -> int:
    """Fill the caches that nobody holds."""
    runner = lm.engine.runner
    assert runner is not None
    for memory in (*runner.cache.keys, *runner.cache.values):
        memory.fill_(NAN)
    return len(runner.rows)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("assist", [False, True])
def test_what_a_cache_held_before_changes_no_bit(chatty: SpeechLM, assist: bool) -> None:
    def talk(lm: SpeechLM) -> list[Any]:
        with lm.session(seed=2, text_assist=assist, **SHORT) as session:
            answers = [session.ask(*asked).answer() for asked in ASKED]
            session.cancel(played_seconds=0.1, shown_characters=1)  # cut, and a fork, in a cache that is partly used
            return [said(answer) for answer in (*answers, session.ask(*ASKED[1]).answer(), session.ask(*ASKED[0]).answer())]

    def batch(lm: SpeechLM) -> list[Any]:
        questions, tasks = zip(*ASKED, strict=True)
        return [said(answer) for answer in lm.generate(list(questions), tasks, batch_size=2, **SHORT)]

    expected = talk(chatty), batch(chatty)
    assert poison(chatty)
    assert (talk(chatty), batch(chatty)) == expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by", ["adapter", "edit", "head"])
def test_a_broken_row_ends_alone(by: str, dtype: torch.dtype) -> None:
    lm = make_lm(LAYOUTS["pad"])
    lm.model.to(dtype)
    targets = ("decoder.audio_head", "decoder.text_head") if by == "head" else DEEP
    if by == "edit":  # one that is a number in float16 too: others are refused
        wrong: dict[str, Any] = {"edits": huge_edits(lm).map(lambda t: t / 1e21 if dtype == torch.float16 else t)}
    else:
        wrong = {"adapter": huge_adapter(lm, targets)}
    questions: list[Any] = [tone(0.3), "what now?", tone(0.3, 330.0)]
    tasks = ["A1A2", "T1T2", "A1A2"]
    clean = [said(lm.generate(q, t, **SHORT)) for q, t in zip(questions, tasks, strict=True)]
    assert all(answer[3] != "error" for answer in clean)
    ((name, value),) = wrong.items()
    for broken in range(3):
        given = [value if i == broken else None for i in range(3)]
        answers = lm.generate(questions, tasks, **{name: given}, **SHORT)
        for i, answer in enumerate(answers):
            assert broke(answer) and answer.text == "" if i == broken else said(answer) == clean[i]
    assert broke(lm.generate(questions[0], **wrong, **SHORT))
    assert said(lm.generate(questions[0], **SHORT)) == clean[0]


def test_features_that_are_not_finite_are_refused_and_spoil_no_clip_beside_them() -> None:
    lm = make_lm(LAYOUTS["pad"])
    huge = huge_adapter(lm, ("projector.project",))
    clips = [tone(0.3), tone(0.31, 330.0), tone(0.5)]
    clean = [said(lm.generate(clip, **SHORT)) for clip in clips]
    with lm.session(adapter=huge, **SHORT) as session:
        (ended,) = session.ask(clips[0])
        assert isinstance(ended, Ended) and ended.reason == "error" and "features" in (ended.error or "")
        assert not session.turns
    with lm.session(**SHORT) as session:
        session.ask(clips[0]).answer()
    with lm.session(adapter=huge, history=session.history) as session:
        assert broke(session.ask("and", "T1A2").answer()) and len(session.turns) == 1
    answers = lm.generate(clips, adapter=[None, huge, None], **SHORT)
    assert broke(answers[1]) and [said(answers[i]) for i in (0, 2)] == [clean[0], clean[2]]


def test_a_codec_that_fails_for_one_answer_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = make_lm(LAYOUTS["pad"])
    questions = ["one", "two", "three"]
    clean = lm.generate(questions, "T1A2", **SHORT)
    push, bad = EchoStream._push, clean[1].codes
    assert bad is not None

    def failing(stream: Any, codes: Tensor) -> Tensor:
        stream.all = torch.cat([getattr(stream, "all", codes[:, :0]), codes], dim=1)
        if torch.equal(stream.all, bad[:, :4]):
            raise RuntimeError("no such code")
        return push(stream, codes)

    monkeypatch.setattr(EchoStream, "_push", failing)
    answers = lm.generate(questions, "T1A2", **SHORT)
    assert [said(answers[i]) for i in (0, 2)] == [said(clean[i]) for i in (0, 2)]
    heard = answers[1].audio
    assert heard is not None and clean[1].audio is not None and torch.equal(heard, clean[1].audio[: len(heard)])
    assert answers[1].ended == "error" and len(heard) == 8 and clean[1].text.startswith(answers[1].text)
    assert answers[1].error is not None and "codec echo cannot decode the answer (no such code)" in answers[1].error


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_memory_that_ran_out_is_no_answer_s_fault(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> Tensor:
        raise error("no memory")

    lm = make_lm(LAYOUTS["pad"])
    monkeypatch.setattr(EchoStream, "_push", full)
    for answer in (lm.generate, lambda question, *rest, **options: lm.generate([question], *rest, **options)):
        with pytest.raises(error, match="no memory"):
            answer("one", "T1A2", **SHORT)  # type: ignore[operator]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("assist, seed", [(False, None), (True, 7)])
def test_a_conversation_goes_on_as_if_a_broken_question_had_not_been_asked(
    chatty: SpeechLM, assist: bool, seed: int | None
) -> None:
    edits = huge_edits(chatty)

    def talk(between: bool) -> tuple[list[Any], Any]:
        with chatty.session(context=90, overflow="forget", text_assist=assist, **SHORT) as session:
            out = []
            for turn, (question, task) in enumerate(ASKED):
                if between and turn in (1, 4):
                    kept = session.turns
                    with chatty.edited(edits):
                        events = list(session.ask("what breaks, and is so long that turns are forgotten", "T1A2", seed=seed))
                    assert isinstance(events[-1], Ended) and events[-1].reason == "error" and events[-1].error
                    session.cancel(played_seconds=0.0)  # too late for a listener to cut what is not there
                    assert len(session.turns) == len(kept)
                out.append(said(session.ask(question, task, seed=seed).answer()))
            return out, [(turn.text, turn.task) for turn in session.turns]

    assert talk(True) == talk(False)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("place, says", [
    ((EchoStream, "_push"), "codec echo cannot decode the answer (no such code)"),
    ((EchoStream, "_finish"), "codec echo cannot decode the answer (no such code)"),
    ((Tokenizer, "decode"), "the answer's text cannot be decoded (no such code)"),
])  # fmt: skip
def test_an_answer_that_cannot_be_decoded_ends_and_is_not_remembered(
    place: tuple[type, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = make_lm(LAYOUTS["pad"])

    def failing(*_: object) -> None:
        patch.undo()  # once
        raise RuntimeError("no such code")

    with lm.session(**SHORT) as session, lm.session(**SHORT) as other:
        assert said(session.ask("one", "T1A2").answer()) == said(other.ask("one", "T1A2").answer())
        with monkeypatch.context() as patch:
            patch.setattr(*place, failing)
            answer = session.ask("two", "T1A2").answer()
        assert answer.ended == "error" and answer.error is not None and answer.error.startswith(says)
        assert len(session.turns) == 1
        assert said(session.ask("three", "T1A2").answer()) == said(other.ask("three", "T1A2").answer())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("task", ["T1A2", "T1T2", "T1A1"])
def test_one_logit_is_enough(task: str, value: float, late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever head it is of, and at whichever step: what was handed over before is in the answer, not in the history."""
    lm = make_lm(LAYOUTS["pad"])
    decoder, steps = lm.model.decoder, {"text": 0, "audio": 0}
    whole = lm.generate("hello", task, **SHORT)
    for kind in ("text", "audio"):
        head = getattr(decoder, f"{kind}_logits")

        def spoilt(hidden: Any, kind: str = kind, head: Any = head) -> Tensor:
            logits = head(hidden).clone()
            steps[kind] += 1
            if steps[kind] == 1 + 2 * late:
                logits[..., 5] = value
            return logits

        monkeypatch.setattr(decoder, f"{kind}_logits", spoilt)
    with lm.session(**SHORT) as session:
        answer = session.ask("hello", task).answer()
        assert broke(answer) and answer.error is not None and f"at time step {2 * late} " in answer.error
        assert answer.timings.steps == 2 * late and answer.tokens == whole.tokens[: len(answer.tokens)]
        assert session.turns == ()
        assert said(session.ask("hello", task).answer()) == said(whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_makes_a_row_a_broken_one(dtype: torch.dtype) -> None:
    logits = torch.full((6, 1031), 6e4).to(dtype)  # their sum is infinite in float16; they are not
    hidden = torch.ones(6, 1, 32)
    for row, value in enumerate((NAN, float("inf"), -float("inf"))):
        logits[row, 517 + row] = value
    hidden[3], hidden[4, 0, :31] = 0, 0
    assert broken_rows(hidden.to(dtype), logits).tolist() == [True, True, True, True, False, False]


def test_text_that_a_broken_row_writes_for_another_breaks_it_too() -> None:
    lm = make_lm(LAYOUTS["pad"])
    decoder = lm.model.decoder
    text_logits = decoder.text_logits
    with pytest.MonkeyPatch.context() as patch, lm.session(text_assist=True, **SHORT) as session:
        patch.setattr(decoder, "text_logits", lambda hidden: text_logits(hidden) * NAN)
        answer = session.ask("hello", "T1A2").answer()
    assert broke(answer) and answer.tokens == ()
