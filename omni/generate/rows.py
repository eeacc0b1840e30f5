"""Data of one row of the step runner: its start, its present state, and the output of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from omni.generate.sampling_config import Sampling
from omni.lora.selection import RowSelection


@dataclass(frozen=True)
class Start:
    """Start of a row's answer.

    Attributes:
        text, audio: the streams it answers on.
        position: of the prompt's last column in the cache.
        settings: sampling settings of each stream.
        key: key of its random numbers (`seed_key`).
        partner: slot of the row that writes its text (text assist), None where it writes itself.
        selection: the adapter and the edits that act on the row, None for the model's active ones.
        logprobs: return the log-probabilities of what is sampled.
    """

    text: bool
    audio: bool
    position: int
    settings: tuple[Sampling, ...]
    key: int = 0
    partner: int | None = None
    selection: RowSelection = None
    logprobs: bool = False


@dataclass(eq=False)
class RunnerRow:
    """State of a row from its first column until it leaves.

    Attributes:
        slot: its row of the cache.
        position: position at which its next column will be fed (counted on the host, so it may be one past the end of a
            row that is done).
        needs_text, needs_audio: whether it still needs each head.
        partner: slot of the row whose text it takes.
        selection: adapter and edits that act on it, as in `Start`; `logprobs` likewise.
        live: whether it has not left yet.
        done: whether its answer is complete.
    """

    slot: int
    position: int
    needs_text: bool
    needs_audio: bool
    partner: int | None = None
    selection: RowSelection = None
    live: bool = True
    done: bool = False
    logprobs: bool = False


class StepOutput(NamedTuple):
    """Output of one step for one row: the column that is fed next, a finished frame, a text token, whether the answer is done,
    whether it is broken (logits that it was drawn from are not finite, so that its ids mean nothing), and, where they were
    asked for, the log-probabilities of the K sampled ids (of forced ids they mean nothing)."""

    column: tuple[int, ...]
    frame: list[int] | None
    text: int | None
    done: bool
    broken: bool = False
    logprobs: tuple[float, ...] | None = None


def span(slots: Sequence[int]) -> tuple[int, int] | None:
    """First slot and the one after the last; None for no slots."""
    return (min(slots), max(slots) + 1) if slots else None
