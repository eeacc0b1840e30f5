"""Which words of an answer were heard when it is cut: the placement against espeak-ng's own word events."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

import pytest
import torch

from omni.generate.speech_time import Loudness, SpeechTime, heard_characters
from tests.train.data.spoken_answers import LEARNT, MEASURED, Said, answers, say
from tests.train.data.toys import ToyCodec
from train.data.build import estimate_speech_time
from train.data.rows.row import Codes, Row, RowTurn
from train.data.sources.mixture import Mixture
from train.data.tts import espeak as voice

CODEC = ToyCodec((8, 8))


@dataclass
class Spoken:
    """A source of answers with codes: as many frames as the sound fills."""

    rows: list[Said]
    name: str = "spoken"
    repeats: bool = False

    @property
    def size(self) -> int:
        return len(self.rows)

    def identity(self, index: int) -> int:
        return index

    def row(self, index: int) -> Row:
        said = self.rows[index]
        frames = -(-len(said.sound) * CODEC.frame_rate // voice.SAMPLE_RATE)
        codes = Codes(CODEC.name, torch.zeros(2, int(frames), dtype=torch.long))
        return Row((RowTurn("question", answer_text=said.text, answer_codes=codes),))


@functools.cache
def trained(rate: int) -> SpeechTime:
    """Estimated as training does it, on other sentences than those that are measured."""
    found = estimate_speech_time(Mixture([Spoken([say(text, rate) for text in answers(LEARNT, 60, 0)])], [1.0], 0), CODEC)
    assert found is not None
    return found


@functools.cache
def measured(rate: int) -> tuple[Said, ...]:
    return tuple(say(text, rate) for text in answers(MEASURED, 100, 1))


def errors(rate: int, ended: bool) -> torch.Tensor:
    """Words by which a cut at a random time is wrong, against those whose middle espeak-ng has passed; one cut an answer."""
    dice, out = random.Random(7), []
    for said in measured(rate):
        played = dice.uniform(0, said.seconds)
        loudness = Loudness(voice.SAMPLE_RATE)
        loudness.push(said.sound if ended else said.sound[: int(played * voice.SAMPLE_RATE)])
        speech = loudness.speech()
        heard = heard_characters(said.text, trained(rate), played, speech, speech[-1][1] if ended else None)
        out.append(abs(len(said.text[:heard].split()) - int((said.middle <= played).sum())))
    return torch.tensor(out)


@pytest.mark.long
@pytest.mark.parametrize("rate", [175, 230])
@pytest.mark.parametrize("ended", [False, True], ids=["being made", "ended"])
def test_a_cut_is_at_most_one_word_wrong_in_95_of_100_answers(rate: int, ended: bool) -> None:
    pytest.importorskip("espeakng_loader")
    lengths = [len(said.text.split()) for said in measured(rate)]
    assert len(lengths) == 100 and min(lengths) == 3 and max(lengths) >= 35
    wrong = errors(rate, ended)
    assert wrong.double().quantile(0.95) <= 1, wrong.bincount()
