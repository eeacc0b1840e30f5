"""The toy data: spoken questions about digits, made while training; and the exam of a model that was trained on them.

A plug-in beside its recipes, which name it by `plugins: [./digits]`; an example of a source of one's own (docs/extending.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from omni.errors import UserError
from train import SourceOptions, register_source

from .options import WORDY, RecordedDigitsConfig, SpokenDigitsConfig

if TYPE_CHECKING:
    from omni.codec.base import AudioCodec
    from train.config.run import FitConfig
    from train.console.progress import Progress
    from train.eval.turn_ends import PausedQuestion

    from .recorded import RecordedDigits
    from .spoken import SpokenDigits


@register_source("spoken-digits")
@dataclass(frozen=True)
class SpokenDigitsOptions(SpokenDigitsConfig, SourceOptions):
    """Makes the spoken questions, and examines a model with them."""

    @property
    def vocabulary(self) -> tuple[str, ...]:
        from .spoken import vocabulary

        return vocabulary(self)

    @property
    def has_held_out(self) -> bool:
        return self.examined

    def build(self, codec: AudioCodec | None, seed: int) -> SpokenDigits:
        from .spoken import SpokenDigits

        return SpokenDigits(self, _there(codec), seed)

    def paused_questions(self, codec: AudioCodec | None, count: int, voices: tuple[str, ...] = ()) -> list[PausedQuestion]:
        """Questions for `omni-train eval --turn_ends`, in the voices of `held_out` or in others."""
        from .asking import paused_questions

        others = tuple(each for each in self.variants if all(voice.partition("+")[2] != each for voice in voices))
        asked = replace(self, held_out=voices, variants=others, rare_variants=(), rare=0.0) if voices else self
        return paused_questions(asked.build(codec, 0), count)

    def demonstrate(self, config: FitConfig) -> int:
        """Trains as `omni-train demo` does, examines the model, and asks it one question aloud; returns the exit code."""
        from .exam import demonstrate

        return demonstrate(config, self)


@register_source("recorded-digits")
@dataclass(frozen=True)
class RecordedDigitsOptions(RecordedDigitsConfig, SourceOptions):
    """Makes the strings that are joined from recordings."""

    @property
    def vocabulary(self) -> tuple[str, ...]:
        from .spoken import vocabulary

        return vocabulary(self.answers)

    @property
    def own_tasks(self) -> dict[str, float]:
        share = self.wordy * (self.voices + self.more)
        return {WORDY: share} if share > 0 else {}

    @property
    def has_held_out(self) -> bool:
        return bool(self.held_out)

    def build(self, codec: AudioCodec | None, seed: int) -> RecordedDigits:
        from .recorded import RecordedDigits

        return RecordedDigits(self, _there(codec), seed)

    def check(self) -> None:
        from .recorded import find_recordings

        find_recordings(self.folder)

    def prepare(self, progress: Progress) -> None:
        from .recorded import speak_ahead

        speak_ahead(self, progress)


def _there(codec: AudioCodec | None) -> AudioCodec:
    if codec is None:
        raise UserError("spoken and recorded digits are answered in speech and need a codec; set model.codec")
    return codec
