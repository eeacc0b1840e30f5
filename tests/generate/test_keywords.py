"""Options of answers: names of transformers and OpenAI, limits, stop strings and functions, silence, log-probabilities."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from omni.errors import UserError
from omni.generate.options import GREEDY, SamplingNames, make_options
from omni.generate.results import AudioChunk, Ended, StopText, TextDelta
from omni.generate.sampling import Sampling
from omni.generate.speech_lm import SpeechLM
from omni.generate.speech_time import Loudness
from omni.layout import Layout
from omni.tasks import Turn, answer, join, prompt
from omni.text import Tokenizer
from tests.generate.conftest import LAYOUTS, EchoCodec, EchoStream, make_lm, make_model, tone
from tests.generate.session_toys import TALKATIVE, inside

SAMPLING = {
    "openai": ({"temperature": 0.7, "top_p": 0.9}, Sampling(0.7, top_p=0.9)),
    "transformers": (
        {"do_sample": True, "temperature": 0.8, "top_k": 5, "repetition_penalty": 1.1},
        Sampling(0.8, 5, 1.0, 1.1),
    ),
    "a filter asks for a draw": ({"top_p": 0.9}, Sampling(1.0, top_p=0.9)),
    "a draw alone": ({"do_sample": True}, Sampling(1.0)),
    "greedy as transformers writes it": ({"do_sample": False, "temperature": None, "top_p": None}, GREEDY),
    "greedy with a penalty": ({"repetition_penalty": 1.2}, Sampling(repetition_penalty=1.2)),
    "greedy": ({"temperature": 0.0}, GREEDY),
}


def test_every_field_of_a_sampling_is_a_keyword() -> None:
    assert SamplingNames.__annotations__.keys() == {"do_sample", *(field.name for field in fields(Sampling))}


@pytest.mark.parametrize("name", SAMPLING)
def test_names_of_the_sampling_are_a_sampling(name: str) -> None:
    keywords, wanted = SAMPLING[name]
    assert make_options(keywords).sampling == wanted


@pytest.mark.long
def test_most_new_tokens_are_the_steps_of_any_answer(lm: SpeechLM) -> None:
    spoken, written = (lm.generate("hello", task, max_new_tokens=9, top_k=3) for task in ("T1A2", "T1T2"))
    for each in (spoken, written, *lm.generate(["hello"], ["T1A2"], max_new_tokens=9, top_k=3)):
        assert each.ended == "length" and each.timings.steps == 9
    assert spoken.codes is not None and spoken.codes.shape[1] == 9 - lm.layout.max_delay and len(written.tokens) == 9
    assert lm.generate("hello", "T1A2", max_new_tokens=500, max_seconds=0.2, top_k=3).timings.steps <= 10
    long = lm.generate("hello", "T1T2", max_new_tokens=600, context=400)
    assert long.ended in ("end", "cache")  # not cut at 512, the default of max_tokens


@pytest.mark.sampled(1)
def test_most_tokens_are_those_of_a_written_answer(lm: SpeechLM) -> None:
    whole = lm.generate("hello", "T1T2", max_tokens=30, top_k=3).tokens
    for most in (1, 3, len(whole)):
        alone = lm.generate("hello", "T1T2", max_tokens=most, top_k=3)
        for each in (alone, *lm.generate(["hello"], ["T1T2"], max_tokens=most, top_k=3)):
            assert each.tokens == whole[:most] and each.ended == "length" and each.timings.steps == most


MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "twice": ({"temperature": 0.5, "sampling": GREEDY}, UserError, r"temperature and sampling .*Sampling\(temperature=0.5\)"),
    "two limits": ({"max_tokens": 5, "max_new_tokens": 5}, UserError, "max_tokens and max_new_tokens"),
    "contradiction": ({"do_sample": False, "temperature": 0.5}, UserError, "do_sample is False, but temperature is 0.5"),
    "cold draw": ({"do_sample": True, "temperature": 0}, UserError, "do_sample is True, but temperature is 0"),
    "value": ({"top_p": 2.0}, UserError, r"top_p is 2.0; it must be"),
    "stream": ({"sampling": {"text": 0.7}}, UserError, r"sampling is \{'text': 0.7\}; it must be"),
    "limit": ({"max_new_tokens": 0}, UserError, "max_new_tokens is 0"),
    "no stop": ({"stop": ["a", ""]}, UserError, r"stop is \['a', ''\]"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told(name: str) -> None:
    lm = make_lm(LAYOUTS["pad"])
    keywords, kind, line = MISTAKES[name]
    calls = [lambda **kw: lm.generate("hi", **kw), lambda **kw: lm.stream("hi", **kw), lm.session]
    for call in (*calls, lambda **kw: lm.generate(["hi"], "T1T2", **kw)):
        with pytest.raises(kind, match=line):
            call(**keywords)


@pytest.mark.parametrize("stops", [("lo w",), ("zzz",), ("d",), ("world", "o"), ("ll", "llo"), ("hello world",)])
@pytest.mark.parametrize("size", [1, 2, 3, 11])
def test_a_text_is_given_up_to_the_first_stop_however_it_comes(stops: tuple[str, ...], size: int) -> None:
    text = "hello world"
    stop = StopText(stops)
    given = []
    for start in range(0, len(text), size):
        given.append(stop.push(text[start : start + size]))
        assert not any(s in "".join(given) for s in stops)
    end = min([place for place in map(text.find, stops) if place >= 0], default=len(text))
    assert "".join(given) + stop.finish() == text[:end] and stop.stopped == any(s in text for s in stops)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("task", ["T1A2", "T1T2", "A1A2"])
def test_an_answer_ends_before_a_stop_string(lm: SpeechLM, task: str) -> None:
    question = tone(0.3) if task == "A1A2" else "hello"
    options: dict[str, Any] = {"temperature": 1.0, "top_k": 3, "seed": 5, "max_seconds": 0.8, "max_tokens": 30}
    whole = lm.generate(question, task, **options)
    place = next(i for i in range(6, len(whole.text)) if whole.text.find(whole.text[i : i + 2]) == i)
    stop = whole.text[place : place + 2]
    answer = lm.generate(question, task, stop=["never", stop], **options)
    assert answer.ended == "stop" and answer.text == whole.text[:place]
    assert answer.tokens == whole.tokens[: len(answer.tokens)]
    assert answer.text.startswith(lm.tokenizer.decode(answer.tokens))
    if whole.codes is not None:
        assert answer.codes is not None and answer.audio is not None
        frames = answer.codes.shape[1]
        assert frames == max(0, answer.timings.steps - lm.layout.max_delay) and torch.equal(
            answer.codes, whole.codes[:, :frames]
        )
        assert len(answer.audio) == frames * 4
    (row,) = lm.generate([question], task, stop=stop, **options)
    assert (row.text, row.tokens, row.ended) == (answer.text, answer.tokens, "stop")
    events = list(lm.stream(question, task, stop=stop, **options))
    assert isinstance(events[-1], Ended) and events[-1].reason == "stop"
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == answer.text
    if answer.audio is not None:
        assert sum(len(e.samples) for e in events if isinstance(e, AudioChunk)) == len(answer.audio)


def test_an_end_gives_what_a_stop_held_back(lm: SpeechLM) -> None:
    answer = lm.generate("hello", "T1A2", temperature=1.0, seed=4, max_seconds=0.8)
    assert answer.text
    kept = lm.generate("hello", "T1A2", temperature=1.0, seed=4, max_seconds=0.8, stop=answer.text[-1] + "\0\0")
    assert kept.text == answer.text and kept.ended == answer.ended


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
