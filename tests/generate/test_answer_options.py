"""Silence that ends an answer, functions that stop one, and log-probabilities of what was sampled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni.errors import UserError
from omni.generate.results import Ended
from omni.generate.sampling import Sampling
from omni.generate.speech_lm import SpeechLM
from omni.generate.speech_time import Loudness
from omni.layout import Layout
from omni.tasks import Turn, answer, join, prompt
from omni.text import Tokenizer
from tests.generate.conftest import EchoCodec, EchoStream, make_model
from tests.generate.session_toys import TALKATIVE, inside

SPOKEN: dict[str, Any] = {"sampling": TALKATIVE, "max_seconds": 2.0, "seed": 5}


class FadingStream(EchoStream):
    """Of which the frames from the tenth on are almost silent."""

    given = 0

    def _sound(self, codes: Any, after: Any) -> Any:
        sound = super()._sound(codes, after) + 1.0
        number = self.given + torch.arange(len(sound)) // 4
        self.given += len(sound) // 4
        return torch.where(number < 10, sound, 0.001)


class Fading(EchoCodec):
    def stream(self, seed: int = 0) -> FadingStream:
        return FadingStream(self)


def test_silence_at_the_end_by_the_measure_of_loudness() -> None:
    loudness = Loudness(100)
    assert loudness.silence() == 0
    loudness.push(torch.zeros(7))
    assert loudness.silence() == pytest.approx(0.07)
    loudness.push(torch.tensor([0.5, 1.0, 0.02, 0.02]))
    assert loudness.silence() == pytest.approx(0.02)
    loudness.push(torch.tensor([0.04]))
    assert loudness.silence() == 0


@pytest.mark.sampled(1)
def test_silence_ends_an_answer_alone_and_in_a_batch(layout: Layout) -> None:
    lm = SpeechLM(make_model(layout), Tokenizer.bytes(), Fading(layout.codebook_sizes))
    whole = lm.generate("go on", "T1A2", **SPOKEN)
    cut = lm.generate("go on", "T1A2", max_silence=0.2, **SPOKEN)
    assert whole.audio is not None and cut.audio is not None and whole.ended != "silence"
    assert cut.ended == "silence" and torch.equal(cut.audio, whole.audio[: len(cut.audio)])
    heard = Loudness(100)
    heard.push(cut.audio)
    assert 0.2 <= heard.silence() <= 0.2 + 2 * 0.04 and len(cut.audio) < len(whole.audio)  # a frame, and the last one's rest
    for own in lm.generate(["go on", "say"], "T1A2", max_silence=0.2, **SPOKEN)[:1]:
        assert own.ended == "silence" and torch.equal(own.audio, cut.audio)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="max_silence is 0"):
        lm.session(max_silence=0)
    with pytest.raises(UserError, match="max_silence listens"):
        lm.generate(["go on"], "T1A2", max_silence=0.2, sound=False)


@pytest.mark.sampled(1)
def test_a_function_ends_an_answer_with_the_piece_that_it_says(lm: SpeechLM) -> None:
    options: dict[str, Any] = {"sampling": TALKATIVE, "seed": 3, "max_tokens": 40}
    whole = lm.generate("go on", "T1T2", **options)
    asked: list[str] = []

    def stop(text: str) -> bool:
        asked.append(text)
        return len(text) >= 5

    with lm.session(stop=stop, **options) as session:
        found = session.ask("go on", "T1T2").answer()
        assert found.ended == "stop" and 5 <= len(found.text) < len(whole.text) and whole.text.startswith(found.text)
        assert asked[-1] == found.text and session.turns[0].cut and session.turns[0].text == found.tokens
    assert lm.generate(["go on"], "T1T2", stop=stop, **options)[0].text == found.text


def test_a_function_that_raises_ends_its_answer_with_an_error(lm: SpeechLM) -> None:
    def stop(text: str) -> bool:
        raise ValueError("odd")

    with lm.session(stop=stop, max_tokens=20) as session:
        last = list(session.ask("go on", "T1T2"))[-1]
        assert isinstance(last, Ended) and last.reason == "error" and "ValueError: odd" in str(last.error)
        assert not session.turns


@pytest.mark.sampled(4)
@pytest.mark.parametrize("assist", [False, True])
@pytest.mark.parametrize("heat", [0.0, 0.9])
def test_log_probabilities_are_those_of_a_plain_forward(lm: SpeechLM, heat: float, assist: bool) -> None:
    """Whatever the temperature and the filters; over the ids that a stream may take."""
    options: dict[str, Any] = {"sampling": Sampling(heat, top_k=3 if heat else 0), "max_seconds": 0.5, "seed": 2}
    with lm.session(logprobs=True, text_assist=assist, **options) as session:
        found = session.ask("go on", "T1A2").answer()
        columns = list(inside(session)._last.reply.columns)  # type: ignore[union-attr]
    layout, question = lm.layout, Turn("T1A2", question=tuple(lm.tokenizer.encode("go on")))
    asked = prompt(layout, question)
    fed = torch.cat([asked.tokens, torch.tensor(columns).T], dim=1)
    with torch.no_grad():
        logits = lm.model.decoder.logits(lm.model(fed[None]))
    allowed = layout.allowed().sum(1).tolist()
    first = len(asked) - 1
    odds = [own[0, first:, :n].log_softmax(-1) for own, n in zip(logits, allowed, strict=True)]
    assert found.logprobs is not None and found.codes is not None and found.logprobs.codes is not None
    assert found.logprobs.codes.shape == found.codes.shape and found.codes.shape[1] > 3
    for stream, (codes, own) in enumerate(zip(found.codes.tolist(), found.logprobs.codes, strict=True)):
        wanted = torch.stack([odds[stream][f + layout.delays[stream]][code] for f, code in enumerate(codes)])
        torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5)
    assert len(found.logprobs.text) == len(found.tokens)
    if not assist:
        wanted = torch.stack([odds[-1][t + layout.delays[-1]][token] for t, token in enumerate(found.tokens)])
        torch.testing.assert_close(torch.tensor(found.logprobs.text), wanted, rtol=1e-5, atol=1e-5)
    else:
        writer = prompt(layout, Turn("T1T2", question=question.question))
        text = join([writer, answer(layout, Turn("T1T2", question=question.question, text=found.tokens))])
        with torch.no_grad():
            own = lm.model.decoder.logits(lm.model(text.tokens[None]))[-1][0, len(writer) - 1 :, : allowed[-1]].log_softmax(-1)
        wanted = torch.stack([own[t][token] for t, token in enumerate(found.tokens)])
        torch.testing.assert_close(torch.tensor(found.logprobs.text), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(1)
def test_log_probabilities_in_company_are_those_alone(lm: SpeechLM) -> None:
    options: dict[str, Any] = {"sampling": TALKATIVE, "max_seconds": 0.4}
    alone = [lm.generate(q, "T1A2", logprobs=True, **options) for q in ("one", "two and three")]
    assert lm.generate("one", "T1A2", **options).logprobs is None
    for mine, theirs in zip(alone, lm.generate(["one", "two and three"], "T1A2", logprobs=True, **options), strict=True):
        assert mine.tokens == theirs.tokens and mine.logprobs is not None and theirs.logprobs is not None
        torch.testing.assert_close(torch.tensor(mine.logprobs.text), torch.tensor(theirs.logprobs.text), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mine.logprobs.codes, theirs.logprobs.codes, rtol=1e-5, atol=1e-5)
