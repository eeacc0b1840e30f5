"""The names of transformers and OpenAI: sampling, limits and stop strings as keywords of a call."""

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
from tests.generate.conftest import LAYOUTS, make_lm, tone

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
    for answer in (spoken, written, *lm.generate(["hello"], ["T1A2"], max_new_tokens=9, top_k=3)):
        assert answer.ended == "length" and answer.timings.steps == 9
    assert spoken.codes is not None and spoken.codes.shape[1] == 9 - lm.layout.max_delay and len(written.tokens) == 9
    assert lm.generate("hello", "T1A2", max_new_tokens=500, max_seconds=0.2, top_k=3).timings.steps <= 10
    long = lm.generate("hello", "T1T2", max_new_tokens=600, context=400)
    assert long.ended in ("end", "cache")  # not cut at 512, the default of max_tokens


@pytest.mark.sampled(1)
def test_most_tokens_are_those_of_a_written_answer(lm: SpeechLM) -> None:
    whole = lm.generate("hello", "T1T2", max_tokens=30, top_k=3).tokens
    for most in (1, 3, len(whole)):
        for answer in (
            lm.generate("hello", "T1T2", max_tokens=most, top_k=3),
            *lm.generate(["hello"], ["T1T2"], max_tokens=most, top_k=3),
        ):
            assert answer.tokens == whole[:most] and answer.ended == "length" and answer.timings.steps == most


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


# --- stop strings -------------------------------------------------------------------------------------------------------


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
