"""How synthetic questions are spoken: rate and pitch, silence around a question, and pauses inside."""

from __future__ import annotations

from dataclasses import dataclass

from omni.utils.ranges import check_fields, ranged
from train.data.rows.row import Sound
from train.data.seeding import seeded_rng
from train.data.tts.contract import Voice


@dataclass(frozen=True)
class SpeakingConfig:
    """How questions are spoken. A range is lowest and highest, drawn evenly: rate and pitch for a row, all else for a question.

    Attributes:
        rate: words per minute, of espeak and flite; null for 130 to 200 where a voice is drawn, and else the voice's own.
        pitch: 0 to 100, 50 is the voice's own, of espeak and flite; null for 25 to 75 where a voice is drawn, else its own.
        silence: seconds before and after a question.
        pause: share of the questions that pause once, after a random word.
        hesitant: share of the questions that are spoken in two parts, each with an intonation of its own.
        hesitation: seconds of silence between these.
    """

    rate: tuple[int, int] | None = ranged(None, 80, 450)
    pitch: tuple[int, int] | None = ranged(None, 0, 100)
    silence: tuple[float, float] = ranged((0.0, 0.0), 0, 10)
    pause: float = ranged(0.0, 0, 1)
    hesitant: float = ranged(0.0, 0, 1)
    hesitation: tuple[float, float] = ranged((0.2, 1.0), 0, 10)

    def __post_init__(self) -> None:
        check_fields(self, "speaking")


class SpeakingVoice:
    """A voice with silence around what it says and pauses inside: these depend on the text and the seed alone."""

    def __init__(self, voice: Voice, config: SpeakingConfig) -> None:
        self.voice, self.config = voice, config

    def speaker(self, language: str, seed: int) -> str:
        """See `Voice.speaker`."""
        return self.voice.speaker(language, seed)

    def say(self, text: str, language: str, seed: int) -> Sound:
        """Speak the text, see `Voice.say`; a pause is a comma, which every program knows."""
        import torch

        rng, halting = seeded_rng(seed, "speaking", text), seeded_rng(seed, "hesitant", text)
        words = text.split()
        if len(words) > 1 and rng.random() < self.config.pause:
            place = rng.randrange(len(words) - 1)
            words[place] += "," * words[place][-1].isalnum()
        parts = [words]
        if len(words) > 1 and halting.random() < self.config.hesitant:
            place = halting.randrange(1, len(words))
            parts = [words[:place], words[place:]]
        sounds = [self.voice.say(" ".join(part), language, seed) for part in parts]
        rate = sounds[0].sample_rate
        before, after = (round(rng.uniform(*self.config.silence) * rate) for _ in range(2))
        between = round(halting.uniform(*self.config.hesitation) * rate)
        padding = [(before if i == 0 else between, after if i == len(sounds) - 1 else 0) for i in range(len(sounds))]
        pieces = [torch.nn.functional.pad(sound.load(rate), pad) for sound, pad in zip(sounds, padding, strict=True)]
        return Sound(torch.cat(pieces), rate)
