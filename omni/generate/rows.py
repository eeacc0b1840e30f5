"""What the step runner takes and gives for a row: how it starts, where it is, what a step wrote on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from omni.generate.sampling_config import Sampling
from omni.lora.selection import RowSelection


@dataclass(frozen=True)
class Start:
    """How a row starts its answer.

    Attributes:
        text, audio: the streams it answers on.
        position: of the prompt's last column in the cache.
        settings: sampling of each stream.
        key: of its random numbers (`seed_key`).
        partner: slot of the row that writes its text (text assist), None where it writes itself.
        selection: the adapter and the edits that act on the row, None for the model's own choice.
    """

    text: bool
    audio: bool
    position: int
    settings: tuple[Sampling, ...]
    key: int = 0
    partner: int | None = None
    selection: RowSelection = None


@dataclass(eq=False)
class RunnerRow:
    """A row from its first column until it leaves.

    Attributes:
        slot: its place in the cache.
        position: where its next column will be fed (counted on the host, so it may be one past the end of a
            row that is done).
        needs_text, needs_audio: heads it still asks for.
        partner: slot of the row whose text it takes.
        selection: what acts on it.
        live: it has not left.
        done: its answer is complete.
    """

    slot: int
    position: int
    needs_text: bool
    needs_audio: bool
    partner: int | None = None
    selection: RowSelection = None
    live: bool = True
    done: bool = False


class StepOutput(NamedTuple):
    """What one step wrote on one row: the column that is fed next, a finished frame, a text token, whether that was all, and
    whether it means nothing, because logits that it was drawn from are not finite."""

    column: tuple[int, ...]
    frame: list[int] | None
    text: int | None
    done: bool
    broken: bool = False
