"""Speak the questions of a conversation with the demonstration's model: `python -m tests.judges.questions FOLDER`.

The files are WAV of 24 kHz, mono, 16 bits.
"""

from __future__ import annotations

import sys
from pathlib import Path

import soundfile

from omni.audio.resample import resample
from train.data.tts.espeak import SAMPLE_RATE, synthesise

QUESTIONS = (
    "what is two plus three",
    "and twice that",
    "say it again",
    "read back one zero seven six",
    "repeat eight nine",
    "say it again",
)
"""The second, third and last need the turn before; the fourth has the longest answer, which the fifth interrupts."""


def speak(folder: Path) -> list[Path]:
    """Write one file per question, in their order."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number, text in enumerate(QUESTIONS, 1):
        sound = resample(synthesise(text, "en-us+f2", rate=165)[0], SAMPLE_RATE, 24000)
        file = folder / f"{number}-{text.replace(' ', '-')}.wav"
        soundfile.write(file, (0.5 * sound / sound.abs().max()).numpy(), 24000, subtype="PCM_16")
        files.append(file)
    return files


if __name__ == "__main__":
    print(*speak(Path(sys.argv[1])), sep="\n")
