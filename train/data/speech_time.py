"""Estimates the speaking time of a text by the answering voice of a run's data."""

from __future__ import annotations

from collections.abc import Iterator

from omni.codec.base import AudioCodec
from omni.errors import UserError
from omni.generate.speech_time import SpeechTime, estimate
from train.data.sources.base import StoredSource, drawn_row
from train.data.sources.mixture import Mixture

DRAWS = 128
"""Number of a run's first draws that are measured: the same ones at every start, and with any number of processes."""


def estimate_speech_time(mixture: Mixture, codec: AudioCodec) -> SpeechTime | None:
    """Estimate the speaking time of a run's answers by their texts and the lengths of their sound; None where none has both."""
    return estimate(_spoken(mixture, codec))


def _spoken(mixture: Mixture, codec: AudioCodec) -> Iterator[tuple[str, float]]:
    """Iterate over text and seconds of each answer of these draws; unreadable rows are skipped: training reports them."""
    seen = set()
    sources = [source.whole() if isinstance(source, StoredSource) else source for source in mixture.sources]
    for number in range(DRAWS if mixture.total is None else min(DRAWS, mixture.total)):
        draw = mixture.draw(number)
        source = sources[draw.source]
        where = (draw.source, source.identity(draw.index))
        if where in seen:
            continue
        seen.add(where)
        try:
            for turn in drawn_row(source, draw.index, draw.place).turns:
                if turn.answer_codes is not None and turn.answer_codes.codec == codec.name:
                    yield turn.answer_text, turn.answer_codes.frames.shape[-1] / codec.frame_rate
                elif turn.answer_audio is not None and turn.answer_text.strip():
                    yield turn.answer_text, len(turn.answer_audio.load(codec.sample_rate)) / codec.sample_rate
        except UserError:
            continue
