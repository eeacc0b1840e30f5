"""Measures first audio and real-time factor: streams some of the questions one by one.

The seconds are those of `omni.generate.results.Timings`, from the question's samples in hand to the first samples of the
answer, encoder, prefill, steps and codec included. The first question is streamed once more beforehand and not counted, since
that includes what is done only once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from omni.generate.results import Ended, Timings
from omni.generate.speech_lm import SpeechLM
from omni.tasks import Task
from train.console.progress import Display
from train.data.readers import Broken
from train.eval.answers import make_item
from train.eval.config import EvalConfig, Progress
from train.eval.held_out import Item
from train.eval.journal import Journal
from train.eval.questions import Questions


def time_some(
    lm: SpeechLM,
    questions: Questions,
    answered: Sequence[int],
    task: Task,
    config: EvalConfig,
    file: Path,
    progress: Progress,
) -> None:
    """Streams `config.timed` of the questions at `answered`, spread evenly over them, and writes a record of each."""
    count = min(config.timed, len(answered))
    sample = Questions(questions.source, [answered[i * len(answered) // count] for i in range(count)])
    journal = Journal(file, max(1, count), count)  # timed together or not at all
    if journal.done == count:
        return
    records: list[dict[str, Any]] = []
    display = Display(count, 0, progress)
    try:
        for index, row in sample.iterate():
            display.tick(1, 0.0)
            assert not isinstance(row, Broken)  # it has been answered
            item = make_item(row, task, lm)
            if not records:
                _stream(lm, item, config)
            timed = scores(_stream(lm, item, config))
            records.append(
                {"index": index, "where": row.where, "scores": timed, "threads": torch.get_num_threads(), "load": load()}
            )
    finally:
        display.close()
    journal.append(records)


def load() -> float | None:
    """Processes that wanted to run in the last minute, on average; None where the system does not say."""
    return round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None


def scores(timings: Timings) -> dict[str, tuple[float, float]]:
    """The pairs of an answer's times; what it lacks is left out."""
    out: dict[str, tuple[float, float]] = {}
    if timings.first_text is not None:
        out["first_text"] = (1000 * timings.first_text, 1)
    if timings.first_audio is not None:
        out["first_audio"] = (1000 * timings.first_audio, 1)
    if timings.audio:
        out["real_time_factor"] = (timings.total, timings.audio)
    return out


def _stream(lm: SpeechLM, item: Item, config: EvalConfig) -> Timings:
    timings = Timings()
    for event in lm.stream(
        item.question,
        item.task,
        sampling=config.sampling,
        seed=config.seed,
        max_seconds=config.max_seconds,
        max_tokens=config.max_tokens,
        system=item.system,
    ):
        if isinstance(event, Ended):
            timings = event.timings
    return timings
