"""How synthetic questions are spoken: rate and pitch, silence around a question, and pauses inside."""

from __future__ import annotations

from dataclasses import dataclass

from omni.ranges import check_fields, ranged
from train.data.rows.row import Sound
from train.data.seeding import dice
from train.data.tts.contract import Voice


@dataclass(frozen=True)
class SpeakingConfig:
    """How questions are spoken. A range is lowest and highest, drawn evenly: rate and pitch for a row, all else for a question.

    Attributes:
        rate: words per minute, of espeak and flite; null for 130 to 200 where a voice is drawn, and else the voice's own.
        pitch: 0 to 100, 50 is the voice's own, of espeak and flite; null for 25 to 75 where a voice is drawn, else its own.
        silence: seconds before and after a question.
        pause: share of the questions that pause once, after a random word.
    """

    rate: tuple[int, int] | None = ranged(None, 80, 450)
    pitch: tuple[int, int] | None = ranged(None, 0, 100)
    silence: tuple[float, float] = ranged((0.0, 0.0), 0, 10)
    pause: float = ranged(0.0, 0, 1)

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

        rng = dice(seed, "speaking", text)
        words = text.split()
        if len(words) > 1 and rng.random() < self.config.pause:
            place = rng.randrange(len(words) - 1)
            words[place] += "," * words[place][-1].isalnum()
            text = " ".join(words)
        sound = self.voice.say(text, language, seed)
        before, after = (round(rng.uniform(*self.config.silence) * sound.sample_rate) for _ in range(2))
        return Sound(torch.nn.functional.pad(sound.load(sound.sample_rate), (before, after)), sound.sample_rate)
