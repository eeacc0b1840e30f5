"""Spoken digits: the answers are right, the held-out voices are strangers, and every utterance can be made again."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from digits.asking import examine_conversations
from digits.options import SpokenDigitsConfig
from digits.spoken import SpokenDigits, draw_question, draw_questions, vocabulary
from torch import Tensor

from omni.audio.resample import resample
from omni.generate.results import Answer, Timings
from tests.train.data.toys import ToyCodec
from train.config.parse import read_fit_config
from train.data.readers.templates.sentences import NUMBERS, spoken_number
from train.data.rows.row import RowTurn
from train.data.seeding import seeded_rng
from train.data.tts.espeak import synthesise
from train.data.tts.voices import make_voice

ROOT = Path(__file__).parents[2]
CODEC = ToyCodec((12, 12, 6, 8))


def slow_answer(text: str) -> tuple[str, str]:
    """Kind and answer of a question, worked out from its words."""
    numbers = [NUMBERS.index(word) for word in text.split() if word in NUMBERS]
    if "plus" in text.split():
        return "arithmetic", str(numbers[0] + numbers[1])
    if "minus" in text.split():
        return "arithmetic", str(numbers[0] - numbers[1])
    return "digits", "".join(map(str, numbers))


def in_digits(words: str, kind: str) -> str:
    """A spoken answer in digits."""
    if kind == "arithmetic":
        return words.replace("minus ", "-").replace(words.split()[-1], str(NUMBERS.index(words.split()[-1])))
    return "".join(str(NUMBERS.index(word)) for word in words.split())


@pytest.mark.parametrize("arithmetic", [0.0, 0.5, 1.0])
def test_answers_are_right_and_questions_as_varied_as_asked(arithmetic):
    config = SpokenDigitsConfig(arithmetic=arithmetic, lengths=(1.0, 0.0, 1.0))
    drawn = [draw_question(config, seeded_rng(i)) for i in range(2000)]
    for question in drawn:
        assert slow_answer(question.text) == (question.kind, question.digits)
        assert in_digits(question.words, question.kind) == question.digits
        assert set(question.text.split()) <= set(vocabulary(config))
    kinds = Counter(question.kind for question in drawn)
    assert abs(kinds["arithmetic"] / 2000 - arithmetic) < 0.05
    if arithmetic > 0:
        assert {q.digits for q in drawn if q.kind == "arithmetic"} == {str(n) for n in range(-9, 19)}
    if arithmetic < 1:
        assert {len(q.digits) for q in drawn if q.kind == "digits"} == {1, 3}
    assert {question.words for question in drawn} <= set(SpokenDigits(config, CODEC).answers())


def test_follow_ups_double_the_result_or_say_the_answer_again():
    config = SpokenDigitsConfig(turns=(0, 0, 0, 1), follow_ups=0.6)
    source, kinds, results = SpokenDigits(config, CODEC), Counter(), set()
    answers = set(source.answers())
    for i in range(600):
        asked = draw_questions(config, seeded_rng(i), 4)
        assert asked[0].kind in ("arithmetic", "digits")
        for before, question in itertools.pairwise(asked):
            kinds[question.kind] += 1
            if question.kind == "again":
                assert question.text in config.again_phrases
                assert (question.words, question.digits) == (before.words, before.digits)
            elif question.kind == "twice":
                assert question.text in config.twice_phrases and before.kind != "digits"
                said, doubled = (int(n) for n in re.fullmatch(r"twice (-?\d+) is (-?\d+)", question.digits).groups())
                assert said == int(before.digits.split()[-1]) and doubled == 2 * said == question.number
                assert question.words == f"twice {spoken_number(said)} is {spoken_number(doubled)}"
                results.add(doubled)
            else:
                assert slow_answer(question.text) == (question.kind, question.digits)
            assert question.words in answers and set(question.text.rstrip("?").split()) <= set(vocabulary(config))
    assert abs(kinds["again"] + kinds["twice"] - 0.6 * 1800) < 90 and 0.2 < kinds["twice"] / kinds["again"] < 0.6
    assert -18 <= min(results) < -10 and 28 < max(results) <= 36
    row, again = source.row(3), SpokenDigits(config, CODEC).row(3)
    assert [turn.question_text for turn in row.turns] == [turn.question_text for turn in again.turns]
    plain = SpokenDigits(SpokenDigitsConfig(), CODEC)
    assert "that" in vocabulary(config) and "that" not in vocabulary(plain.config)
    assert answers - {*plain.answers()} == {f"twice {spoken_number(n)} is {spoken_number(2 * n)}" for n in range(-9, 19)}


def test_it_is_known_when_each_word_of_an_answer_is_said():
    turn = SpokenDigits(SpokenDigitsConfig(arithmetic=0.0, lengths=(0, 0, 1)), CODEC).row(0).turns[0]
    assert [word.text for word in turn.words] == turn.answer_text.split() and {word.who for word in turn.words} == {"model"}
    assert turn.words[0].start == 0 and all(a.end == b.start for a, b in itertools.pairwise(turn.words))
    assert turn.words[-1].end * CODEC.frame_rate == turn.answer_codes.frames.shape[1]
    assert SpokenDigits(SpokenDigitsConfig(answer_speech="phrase"), CODEC).row(0).turns[0].words == ()


def test_held_out_conversations_are_fixed_and_follow_ups_are_known():
    config = SpokenDigitsConfig(follow_ups=0.5)
    source = SpokenDigits(config, CODEC, seed=1)
    rows, again = source.conversations(6), SpokenDigits(config, CODEC, seed=2).conversations(6)
    for row, other in zip(rows, again, strict=True):
        assert len(row.turns) == 4 and row.speaker in config.held_out
        assert [turn.question_text for turn in row.turns] == [turn.question_text for turn in other.turns]
        for turn in row.turns:
            assert source.follows(turn) == (not any(word in NUMBERS for word in turn.question_text.split()))
    assert len({row.speaker for row in rows}) == 3 and not any(source.follows(row.turns[0]) for row in rows)
    assert any(source.follows(turn) for row in rows for turn in row.turns)


def test_an_utterance_is_the_same_whenever_it_is_made():
    a, b = SpokenDigits(SpokenDigitsConfig(), CODEC, seed=4), SpokenDigits(SpokenDigitsConfig(), CODEC, seed=4)
    rows = [a.row(i) for i in range(6)]
    for i in (3, 0, 5):
        again = b.row(i)
        assert replace(again, turns=()) == replace(rows[i], turns=())
        (turn,), (wanted,) = again.turns, rows[i].turns
        assert torch.equal(turn.question_audio.samples, wanted.question_audio.samples)
        assert torch.equal(turn.answer_codes.frames, wanted.answer_codes.frames)
        assert (turn.question_text, turn.answer_text) == (wanted.question_text, wanted.answer_text)
    assert len({row.turns[0].question_text + row.speaker for row in rows}) > 4
    other = SpokenDigits(SpokenDigitsConfig(), CODEC, seed=5)
    assert any(other.row(i).turns[0].question_text != rows[i].turns[0].question_text for i in range(6))


def test_questions_are_spoken_as_configured():
    config = SpokenDigitsConfig(silence=(0.05, 0.1), peak=0.25, turns=(0, 1), answer_text="digits")
    row = SpokenDigits(config, CODEC).row(1)
    assert len(row.turns) == 2
    for turn in row.turns:
        audio = turn.question_audio.load(16000)
        assert audio.abs().max() == pytest.approx(0.25) and not audio[:800].any() and not audio[-800:].any()
        assert 8000 < len(audio) < 80000
        assert re.fullmatch(r"-?\d+", turn.answer_text)
        assert slow_answer(turn.question_text)[1] == turn.answer_text


def test_hesitant_questions_are_spoken_in_two_parts_and_those_of_the_evaluation_are_not():
    plain = SpokenDigits(SpokenDigitsConfig(), CODEC, seed=3)
    hesitant = SpokenDigits(SpokenDigitsConfig(hesitant=1.0, hesitation=(0.5, 0.9)), CODEC, seed=3)
    for number in range(6):
        whole, parted = (source.row(number).turns[0] for source in (plain, hesitant))
        assert whole.question_text == parted.question_text
        sound = parted.question_audio.load(16_000)
        silent = "".join("_" if not piece.any() else "#" for piece in sound.split(160))
        longest = max(map(len, re.findall("_+", silent.strip("_"))))
        assert 48 <= longest <= 90 and len(sound) > len(whole.question_audio.load(16_000))
    for one, other in zip(plain.held_out(2), hesitant.held_out(2), strict=True):
        assert torch.equal(one.turns[0].question_audio.load(16_000), other.turns[0].question_audio.load(16_000))


@pytest.mark.parametrize("speech", ["words", "phrase"])
def test_answers_are_spoken_by_one_voice_through_the_codec(speech):
    config = SpokenDigitsConfig(answer_speech=speech, answer_voice="en-us+m1", answer_rate=200)
    source = SpokenDigits(config, CODEC)

    def encoded(words: str) -> torch.Tensor:
        audio, rate = synthesise(words, "en-us+m1", 200, 50)
        return CODEC.encode(resample(audio, rate, 8000))

    wanted = torch.cat([encoded("minus"), encoded("two")], dim=1) if speech == "words" else encoded("minus two")
    assert torch.equal(source.answer_codes("minus two"), wanted)
    assert torch.equal(source.answer_codes("minus two"), wanted)  # from the cache
    row = source.row(0)
    assert torch.equal(row.turns[0].answer_codes.for_codec(CODEC), source.answer_codes(row.turns[0].answer_text))


def test_held_out_voices_are_strangers_to_training():
    config = SpokenDigitsConfig()
    source = SpokenDigits(config, CODEC)
    taught = {voice.partition("+")[2] for voice in (*source.voices, *source.rare_voices)}
    held = {voice.partition("+")[2] for voice in config.held_out}
    assert not taught & held
    accents = {voice.partition("+")[0] for voice in config.held_out}
    assert len(config.held_out) >= 4 and len(accents) >= 2
    assert {source.row(i).speaker for i in range(40)} <= {*source.voices, *source.rare_voices}


def test_the_model_that_ships_has_not_heard_the_held_out_voices():
    """The demonstration starts from it: a voice that it was trained on would be no stranger."""
    given = yaml.safe_load((ROOT / "configs/nano-live/voices.yaml").read_text())["voice"]
    voice = make_voice({one: weight for one, weight in given.items() if one.startswith("espeak")})
    heard = {voice.speaker("en", seed) for seed in range(3000)}
    assert {"espeak:en-us+f2", "espeak:en-us+Alex"} < heard and len(heard) > 100  # variants of all accents, and rare ones
    assert not {f"espeak:{one}" for one in SpokenDigitsConfig().held_out} & heard
    nano = read_fit_config([str(ROOT / "configs/nano.yaml")])[0]
    assert nano.model.init_from == "nano" and nano.data.sources[0].made.held_out == SpokenDigitsConfig().held_out


def test_the_evaluation_set_is_fixed_and_balanced():
    source = SpokenDigits(SpokenDigitsConfig(), CODEC, seed=1)
    rows = source.held_out(48)
    again = SpokenDigits(SpokenDigitsConfig(), CODEC, seed=2).held_out(48)
    for a, b in zip(rows, again, strict=True):
        assert a.turns[0].question_text == b.turns[0].question_text and a.speaker == b.speaker
        assert torch.equal(a.turns[0].question_audio.samples, b.turns[0].question_audio.samples)
    assert Counter(row.source for row in rows) == {"spoken-digits/arithmetic": 24, "spoken-digits/digits": 24}
    assert set(Counter((row.source, row.speaker) for row in rows).values()) == {3}
    assert len({row.turns[0].question_text for row in rows}) == 48
    for row in rows:
        kind, answer = slow_answer(row.turns[0].question_text)
        assert row.source.endswith(kind) and in_digits(row.turns[0].answer_text, kind) == answer
    assert source.held_out(8, seed=9)[0].turns[0].question_text != rows[0].turns[0].question_text


@pytest.mark.parametrize(("reuse", "distance"), [(1, 8), (3, 8), (4, 6)])
def test_utterances_return_after_a_distance_and_to_the_same_shard(reuse, distance):
    source = SpokenDigits(SpokenDigitsConfig(reuse=reuse, reuse_distance=distance), CODEC)
    block = reuse * distance
    numbers = [source.identity(n) for n in range(3 * block)]
    assert Counter(numbers) == dict.fromkeys(range(3 * distance), reuse)
    for n in range(3 * block):
        if n % block + distance < block:
            assert numbers[n] == numbers[n + distance]
    for shards in (2, distance // 2):
        if distance % shards == 0:
            assert all(len({n % shards for n in range(len(numbers)) if numbers[n] == u}) == 1 for u in set(numbers))
    assert source.repeats is (reuse > 1)


CODEC = ToyCodec((12, 12, 6, 8))
SOURCE = SpokenDigits(SpokenDigitsConfig(turns=(0, 0, 0, 1), follow_ups=0.5), CODEC)


def said(text: str) -> Answer:
    return Answer(text, torch.zeros(1600), 8000, (), torch.zeros(4, 5, dtype=torch.long), Timings(), "end")


class Forgetful:
    """Knows every question, but not what was cut, and is silent in the fourth turn."""

    codec = CODEC

    def __init__(self, count: int) -> None:
        self.rows = SOURCE.conversations(count, seed=2)
        self.sessions: list[Talk] = []

    def session(self, **_: Any) -> Talk:
        self.sessions.append(Talk(self))
        return self.sessions[-1]

    def generate(self, questions: list[Any], tasks: list[str], **_: Any) -> list[Answer]:
        turns = [turn for row in self.rows for turn in row.turns]
        found = [next(t for t in turns if same(t, question)) for question in questions]
        assert not any(SOURCE.follows(turn) for turn in found)
        return [said(turn.answer_text) for turn in found]


class Talk:
    def __init__(self, lm: Forgetful) -> None:
        self.possible = [row.turns for row in lm.rows]  # conversations that began so: several are held at a time
        self.answered, self.cut = 0, 0

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def ask(self, question: Any, task: str) -> Talk:
        self.possible = [turns for turns in self.possible if same(turns[self.answered], question)]
        turn = self.possible[0][self.answered]
        assert task == ("A1A2" if isinstance(question, Tensor) else "T1A2")
        self.answered += 1
        lost = self.answered == 4 or (SOURCE.follows(turn) and self.cut > 0)
        self.said = said("" if lost else turn.answer_text)
        return self

    def answer(self) -> Answer:
        return self.said

    def cancel(self, played_seconds: float) -> None:
        assert 0 <= played_seconds < 0.2
        self.cut += 1


def same(turn: RowTurn, question: Any) -> bool:
    if isinstance(question, Tensor):
        return turn.question_audio is not None and torch.equal(turn.question_audio.load(16000), question)
    return turn.question_text == question


def test_turns_interruptions_and_follow_ups_are_counted_apart():
    lm = Forgetful(12)
    found = examine_conversations(lm, SOURCE, 12)  # type: ignore[arg-type]
    assert found.alone == 1.0 and found.turns == (1.0, 1.0, 1.0, 0.0)
    later = [(t, SOURCE.follows(turn)) for row in lm.rows for t, turn in enumerate(row.turns) if t]
    early, last = (sum(t < 3 and f for t, f in later), sum(t == 3 and f for t, f in later))
    assert early and last and found.follow_ups == pytest.approx(early / (early + last))
    plain = [t < 3 for t, follows in later if not follows]
    assert found.uncut == found.cut == pytest.approx(sum(plain) / len(plain)) and found.cut_follow_ups == 0.0
    assert sorted(talk.cut for talk in lm.sessions) == [0] * 12 + [3] * 12
    assert {talk.answered for talk in lm.sessions} == {4}
