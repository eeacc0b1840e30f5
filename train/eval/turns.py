"""Asks all turns of each row one after another, in a session that holds the model's own answers, and counts the right ones.

A record is plain data: `index`, `where` and `source` of the row, and its `turns`, each with question, reference, response and
`right`, whether the texts are equal. A row that cannot be asked has `broken`, the reason, instead. Figures are given by source,
which of prepared dialogues names the skill, and by turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni.errors import UserError
from omni.generate.question import SAMPLE_RATE
from omni.stores.tries import StoreError
from omni.tasks import Task
from train.console.progress import Display
from train.data.readers import Broken
from train.data.rows.row import Row
from train.data.seeding import key
from train.eval.config import EvalConfig, Progress
from train.eval.journal import Journal
from train.eval.measures import Figure, figure, pairs_of
from train.eval.questions import Questions
from train.scoring.text import find_normaliser

if TYPE_CHECKING:
    from omni.generate.speech_lm import SpeechLM


def check_turns(task: Task) -> None:
    """Refuses a task that writes no answer, which could be compared (UserError)."""
    if not task.text:
        raise UserError(f"--turns compares texts, and {task.name} writes none: give another --task, or leave --turns out")


def answer_turns(
    lm: SpeechLM, questions: Questions, task: Task, config: EvalConfig, file: Path, progress: Progress = "off"
) -> None:
    """Holds the conversations that have no record yet, `config.batch` at a time, and appends their records to `file`."""
    journal = Journal(file, config.batch, len(questions))
    display = Display(len(questions), journal.done, progress)
    rows = questions.iterate(journal.done)
    try:
        with ThreadPoolExecutor(config.batch) as pool:
            while batch := [one for _, one in zip(range(config.batch), rows, strict=False)]:
                journal.append(list(pool.map(lambda one: _record(lm, one[0], one[1], task, config), batch)))
                display.tick(len(batch), 0.0)
    finally:
        display.close()


def _record(lm: SpeechLM, index: int, row: Row | Broken, task: Task, config: EvalConfig) -> dict[str, Any]:
    record: dict[str, Any] = {"index": index, "where": row.where}
    if isinstance(row, Broken):
        return record | {"broken": row.why}
    try:
        return record | {"source": row.source, "turns": _converse(lm, row, task, config, key(config.seed, index) % (1 << 31))}
    except StoreError:
        raise
    except (ValueError, OSError) as error:
        return record | {"broken": " ".join(str(error).split())}


def _converse(lm: SpeechLM, row: Row, task: Task, config: EvalConfig, seed: int) -> list[dict[str, Any]]:
    """Holds one conversation; UserError where a turn lacks what the task needs, or the session has no room for it."""
    same, out = find_normaliser(config.normaliser), []
    with lm.session(
        sampling=config.sampling,
        seed=seed,
        system=row.system,
        max_seconds=config.max_seconds,
        max_tokens=config.max_tokens,
        pace="whole",
    ) as session:
        for number, turn in enumerate(row.turns):
            lacking = turn.lacks(task)
            if lacking is not None and not lacking.startswith("answer_codes"):
                raise UserError(f"turn {number} has no {lacking}, which {task.name} needs")
            spoken = turn.question_audio if task.question == "audio" else None
            answer = session.ask(turn.question_text if spoken is None else spoken.load(SAMPLE_RATE), task).answer()
            wanted = turn.written(task)
            texts = {"question": turn.question_text, "reference": wanted, "response": answer.text}
            out.append({**texts, "right": same(answer.text) == same(wanted)})
    return out


@dataclass(frozen=True)
class TurnFigure:
    """Exact match of one turn (counted from 1) of all rows of a source."""

    source: str
    turn: int
    exact_match: Figure

    def plain(self) -> dict[str, Any]:
        """The figure as plain data."""
        found = self.exact_match
        numbers = {"exact_match": found.value, "low": found.low, "high": found.high, "questions": found.questions}
        return {"source": self.source, "turn": self.turn, **numbers}


def figures_of_turns(records: Iterable[Mapping[str, Any]]) -> list[TurnFigure]:
    """The figures of records, by source and turn."""
    right: dict[tuple[str, int], list[bool]] = {}
    for record in records:
        for number, turn in enumerate(record.get("turns", ()), 1):
            right.setdefault((record["source"], number), []).append(turn["right"])
    return [TurnFigure(source, turn, _share(answers)) for (source, turn), answers in sorted(right.items())]


def _share(right: Sequence[bool]) -> Figure:
    return figure("exact_match", pairs_of(({"scores": {"exact_match": (float(one), 1)}} for one in right), "exact_match"))
