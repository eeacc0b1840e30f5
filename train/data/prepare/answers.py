"""Answers rows by a model: what it writes to a question's text becomes the answer that it learns to give to its sound."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from omni.errors import UserError
from omni.generate.question import read_question, read_system
from omni.generate.speech_lm import SpeechLM
from omni.tasks import TASKS, prompt
from train.data.executor import in_order
from train.data.readers import Broken, OpenedSource, open_source
from train.data.rows.row import Row
from train.data.seeding import key

TASK = TASKS["T1T2"]
WINDOW = 4
"""Rows that are begun and not yet taken, for each that is under way: so one long answer keeps no other waiting."""
ROOM = 128
"""Positions by which the cache grows."""


class AnsweredSource(OpenedSource):
    """The rows of a data set with a model's own written answers. Each turn's text is asked as T1T2, after the turns before it;
    sound, codes and words of an answer that was there go. A row that cannot be asked is broken, as is one of whose answers the
    end did not come within `max_tokens`: a model that learns from it would not stop.

    Args:
        rows: conversations side by side. An answer does not depend on the others.
        options: of `SpeechLM.session`.
    """

    def __init__(self, lm: SpeechLM, rows: int, max_tokens: int, **options: Any) -> None:
        self.lm, self.rows, self.max_tokens, self.options = lm, rows, max_tokens, options
        self._pool, self._next = ThreadPoolExecutor(rows, "answers"), -1

    def open(self, path: Path) -> AnsweredSource:
        """Opens the data set to answer, for `train.data.prepare.prepare.prepare`."""
        self._source = open_source(path)
        self.format, self.note = self._source.format, self._source.note
        return self

    def close(self) -> None:
        """Drops the questions that nobody takes the answers of, and waits for those under way."""
        self._pool.shutdown(cancel_futures=True)

    def __len__(self) -> int:
        return len(self._source)

    def iterate(self, start: int = 0, stop: int | None = None) -> Iterator[Row | Broken]:
        if start != self._next:
            items = self._source.iterate(start)
            self._answers = in_order(lambda item: self._pool.submit(self._answered, item), items, WINDOW * self.rows)
        self._next = len(self) if stop is None else stop
        yield from islice(self._answers, self._next - start)

    def _answered(self, row: Row | Broken) -> Row | Broken:
        """A row with the model's answers, or why it has none."""
        if isinstance(row, Broken):
            return row
        if not all(turn.question_text.strip() for turn in row.turns):
            return Broken(row.where, "a turn has no question_text to answer")
        try:
            with self.lm.session(**self._session_options(row)) as session:
                turns = []
                for turn in row.turns:
                    answer = session.ask(turn.question_text, TASK).answer()
                    if answer.ended != "end":
                        return Broken(row.where, answer.error or f"its answer has no end within {self.max_tokens} tokens")
                    own: dict[str, Any] = {"answer_audio": None, "answer_codes": None, "answer_start": 0.0}
                    words = tuple(word for word in turn.words if word.who == "user")
                    turns.append(replace(turn, answer_text=answer.text, words=words, **own))
        except UserError as error:
            return Broken(row.where, str(error))
        return replace(row, turns=tuple(turns))

    def _session_options(self, row: Row) -> dict[str, Any]:
        """Options of a row's session, with as many positions as its turns may take."""
        lm, system = self.lm, read_system(row.system, self.lm.tokenizer)
        asked = [read_question(turn.question_text, TASK, lm.config, lm.tokenizer) for turn in row.turns]
        columns = sum(len(prompt(lm.layout, each.after(system).turn)) + self.max_tokens for each in asked)
        context = min(-(-columns // ROOM) * ROOM, lm.config.decoder.context)
        own = {"context": context, "max_tokens": self.max_tokens, "seed": key(row.id) % (1 << 31), "system": row.system}
        return {**own, "pace": "whole", **self.options}
