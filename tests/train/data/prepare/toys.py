"""A small source of rows and what else the tests of `data prepare` hand to other processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from tests.sounds import encoded
from train.data.prepare.prepare import prepare
from train.data.prepare.rows import PrepareConfig
from train.data.readers import Broken, OpenedSource
from train.data.rows.row import Codes, Row, RowTurn, Sound
from train.data.seeding import seeded_generator


class ToySource(OpenedSource):
    """Rows with a spoken question, a written and maybe spoken answer; `broken` ones are none.

    Args:
        kind: "sound": questions and answers as WAV; "text": texts alone; "codes": answers as codec2 frames.
    """

    format = "toy"

    def __init__(self, count: int = 100, kind: str = "sound", broken: tuple[int, ...] = (), bad_sound: tuple[int, ...] = ()):
        self.count, self.kind, self.broken, self.bad_sound = count, kind, broken, bad_sound

    def __len__(self) -> int:
        return self.count

    def iterate(self, start: int = 0, stop: int | None = None) -> Iterator[Row | Broken]:
        for index in range(start, self.count if stop is None else stop):
            yield Broken(f"toy.jsonl row {index}", "no such recording") if index in self.broken else self.row(index)

    def row(self, index: int) -> Row:
        g = seeded_generator("toy", index)
        question = answer = codes = None
        bad = self.kind == "sound" and index in self.bad_sound
        if self.kind != "text":
            question = Sound(data=wav(torch.rand(6500 + 37 * (index % 50), generator=g) - 0.5, 16000, bad))
        if self.kind == "sound":
            answer = Sound(data=wav(torch.rand(600 + 11 * (index % 50), generator=g) - 0.5, 8000))
        if self.kind == "codes":
            frames = torch.randint(16, (4, 5 + index % 7), generator=g)
            if index in self.bad_sound:
                frames[2, 3] = 16
            codes = Codes("codec2", frames)
        turn = RowTurn(f"what is {index}", question, f"it is {index}", answer, codes)
        return Row((turn,), id="" if index % 2 else f"t{index}", source="toy", where=f"toy.jsonl row {index}")


def wav(samples: torch.Tensor, rate: int, bad: bool = False) -> bytes:
    """A WAV of floats, with a NaN in the middle where it is bad."""
    if bad:
        samples[len(samples) // 2] = float("nan")
    return encoded(samples.numpy(), subtype="FLOAT", rate=rate)


def beep(text: str) -> tuple[list[float], int]:
    """A voice: as long as its text."""
    if "7" in text:
        raise KeyError("seven")
    return [0.1, -0.1] * (100 * len(text)), 16000


def tone(text: str, *, seed: int, language: str) -> tuple[torch.Tensor, int]:
    """A voice that differs by seed."""
    assert language == "en"
    return torch.sin(torch.arange(2000) * (0.05 + seed % 97 / 500)), 8000


class Slow(ToySource):
    """Takes its time, so that somebody can interrupt."""

    def row(self, index: int) -> Row:
        time.sleep(0.01)
        return super().row(index)


class Deadly(ToySource):
    """Ends the process that reads item 40."""

    def row(self, index: int) -> Row:
        if index == 40:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().row(index)


class Unfit(ToySource):
    """Holds what cannot be stored in its items 3 and 39; 5 is broken, with half a character in the reason."""

    def __init__(self, count: int) -> None:
        super().__init__(count, "codes")

    def iterate(self, start: int = 0, stop: int | None = None) -> Iterator[Row | Broken]:
        for index, item in enumerate(super().iterate(start, stop), start):
            yield Broken(f"toy.jsonl row {index}", "half \ud83d") if index == 5 else item

    def row(self, index: int) -> Row:
        row = super().row(index)
        if index == 3:
            return replace(row, speaker="\ud83d")
        if index == 39:
            return replace(row, turns=(replace(row.turns[0], answer_codes=Codes("codec2", torch.full((4, 1), 2**40))),))
        return row


if __name__ == "__main__":
    made = prepare(
        sys.argv[1],
        sys.argv[2],
        PrepareConfig(workers=int(sys.argv[3]), shard_mb=1, codec="codec2"),
        opener=lambda _: Slow(200),
    )
    print(made.rows)
