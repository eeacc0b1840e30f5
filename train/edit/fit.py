"""Trains an editor (MEND) on rows of data (`omni-train edit fit CONFIG`).

A correction is made of two rows: the question of one with the answer of another. It is judged on the same question in another
voice, and on unrelated questions, whose answers (the model's own) are to stay. Several may act together, as several facts that
are applied do. Everything of a step is a pure function of seed and number, so a run that was stopped goes on as if it had not
been.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from omni.checkpoint.folder import check_full_precision
from omni.edit.mend import Mend, fit_step, save_mend
from omni.edit.storage import read_tensors, write_tensors
from omni.errors import UserError
from omni.generate.speech_lm import SpeechLM
from omni.tasks import find_task
from train.data.build import build_mixture, build_source
from train.data.rows.row import Row
from train.data.seeding import key, seeded_rng
from train.edit.apply import choose_linears
from train.edit.config import EditFitConfig, SpeakConfig
from train.edit.facts import Synthesiser, plain
from train.edit.lessons import EditExample, EditObjective

CHECKPOINT, EDITOR = "checkpoint", "editor"
TRIES = 50
FREE = ("out", "steps", "checkpoint_steps", "log_steps", "device")
"""Settings that may differ between the starts of a run."""


def fit(config: EditFitConfig) -> Path:
    """Trains an editor, or continues its training; returns its folder.

    Raises:
        UserError: model, data or settings that do not fit, or a checkpoint of another run.
    """
    out = Path(config.out)
    check_full_precision(config.model, "editing")
    lm = SpeechLM.from_pretrained(config.model, config.device, codec_folder=config.codec_folder, kernels="reference")
    for p in lm.model.parameters():
        p.requires_grad_(False)
    linears = choose_linears(lm.model, config.linears)
    torch.manual_seed(key(config.seed, "mend") % (1 << 31))
    mend = Mend.of(lm.model, linears, config.mend).to(lm.model.device)
    mend.tie(lm.model)
    optimizer = torch.optim.Adam(mend.parameters(), lr=config.lr)
    step = _resume(out / CHECKPOINT, mend, optimizer, config)
    corrections = Corrections(lm, EditObjective(lm, linears, config.stream_weights), config)
    while step < config.steps:
        mend.train()
        figures = torch.zeros(3)
        for number in range(step * config.accumulate, (step + 1) * config.accumulate):
            edits, again, others = corrections.make(number)
            lessons = corrections.lessons
            losses = fit_step(lm.model, mend, edits[0], again, others, lessons.loss, lessons.flat_logits, edits[1:])
            figures += torch.stack(losses).cpu()
        for p in mend.parameters():
            if p.grad is not None:
                p.grad /= config.accumulate
        norm = torch.nn.utils.clip_grad_norm_(mend.parameters(), config.clip)
        if not (norm.isfinite() and figures.isfinite().all()):
            raise UserError(
                f"step {step + 1}: loss {figures[0] / config.accumulate:g} and gradient {norm:g} are no numbers to train on; "
                f"lower lr or mend.edit_lr and give another out ({out / CHECKPOINT} keeps what was saved before)"
            )
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % config.log_steps == 0 or step == config.steps:
            total, edited, local = (figures / config.accumulate).tolist()
            print(f"step {step} of {config.steps}: loss {total:.4f}, edits {edited:.4f}, divergence elsewhere {local:.4f}")
        if step % config.checkpoint_steps == 0 or step == config.steps:
            _save(out / CHECKPOINT, mend, optimizer, step, config)
    save_mend(out / EDITOR, mend.eval())
    return out / EDITOR


class Corrections:
    """Makes corrections by number, each with unrelated questions whose answers are to stay."""

    def __init__(self, lm: SpeechLM, lessons: EditObjective, config: EditFitConfig) -> None:
        self.lm, self.lessons, self.config = lm, lessons, config
        sources = [
            build_source(source, lm.codec, key(config.data.seed, "source", i)) for i, source in enumerate(config.data.sources)
        ]
        self.rows = build_mixture(config.data, sources, config.seed)
        again = SpeakConfig(voices=(config.rephrase,)) if config.rephrase is not None else None
        self.speakers = Synthesiser(again, lm.codec, config.seed) if again is not None else None

    def make(self, number: int) -> tuple[list[list[EditExample]], list[EditExample], list[EditExample]]:
        """Makes corrections that act together, the same questions again (in another voice), and questions that are to stay;
        UserError for rows that cannot be used for the task, or that all have one answer."""
        tasks, count, most = self.config.tasks, self.config.others, self.config.together
        task = tasks[number % len(tasks)]
        size = most * TRIES + 2 * count
        drawn = self._draw(range(number * size, number * size + most * TRIES))
        wanted = seeded_rng(self.config.seed, "together", number).randint(1, most) if most > 1 else 1
        asked: list[Row] = []
        edits: list[Row] = []
        for row in drawn:
            if len(edits) == wanted:
                break
            if any(_asks_same(row, candidate) for candidate in asked):
                continue
            others = (other for other in itertools.islice(drawn, TRIES - 1) if not _asks_same(other, row))
            answer = row.turns[0].answer_text.strip()
            other = next((other for other in others if other.turns[0].answer_text.strip() != answer), None)
            if other is not None:
                asked.append(row)
                edits.append(_answered(row, other))
            elif not edits:
                raise UserError(
                    f"{row.where}: {TRIES} other rows have the same answer; a correction needs another one: give more data"
                )
        again = [self._again(edit, task, number * most + i) for i, edit in enumerate(edits)]
        beside = range(number * size + most * TRIES, (number + 1) * size)
        rows = [row for row in self._draw(beside) if not any(_asks_same(row, candidate) for candidate in asked)][:count]
        if not rows:
            raise UserError(f"{asked[0].where}: no other question is there to stay as it is; give more data")
        stay = self.lessons.own_answers(rows, [task]) or rows
        pieces = [self.lessons.pieces(part, [task]) for part in (*([edit] for edit in edits), again, stay)]
        for part, row in zip(pieces, (*edits, again[0], rows[0]), strict=True):
            if not part:
                raise UserError(f"{row.where}: it lacks {row.turns[0].lacks(find_task(task))}, which task {task} needs")
        return pieces[:-2], pieces[-2], pieces[-1]

    def _again(self, edit: Row, task: str, number: int) -> Row:
        """A correction's question, asked by another voice where it is spoken and there is one."""
        turn = edit.turns[0]
        if self.speakers is None or not turn.question_text or find_task(task).question != "audio":
            return edit
        sound, _ = self.speakers.ask(turn.question_text, number)
        return replace(edit, turns=(replace(turn, question_audio=sound),))

    def _draw(self, numbers: Iterable[int]) -> Iterator[Row]:
        for number in numbers:
            draw = self.rows.draw(number)
            yield self.rows.sources[draw.source].row(draw.index)


def _answered(row: Row, other: Row) -> Row:
    """A row's question with the answer of another."""
    answer = other.turns[0]
    turn = replace(
        row.turns[0], answer_text=answer.answer_text, answer_codes=answer.answer_codes, answer_audio=answer.answer_audio
    )
    return replace(row, turns=(turn,))


def _asks_same(row: Row, other: Row) -> bool:
    a, b = (plain(side.turns[0].question_text) for side in (row, other))
    return bool(a) and a == b


# --- checkpoint -------------------------------------------------------------------------------------------------------


def _facts(config: EditFitConfig) -> str:
    """Settings that a checkpoint and the run that goes on with it must agree in."""
    return repr({name: value for name, value in asdict(config).items() if name not in FREE})


def _save(folder: Path, mend: nn.Module, optimizer: torch.optim.Optimizer, step: int, config: EditFitConfig) -> None:
    tensors: dict[str, Tensor] = {f"mend.{name}": tensor for name, tensor in mend.state_dict().items()}
    for name, p in mend.named_parameters():
        tensors |= {f"optimizer.{name}.{field}": value for field, value in optimizer.state.get(p, {}).items()}
    write_tensors(folder, "fit", tensors, {"step": step, "config": _facts(config)})


def _resume(folder: Path, mend: nn.Module, optimizer: torch.optim.Optimizer, config: EditFitConfig) -> int:
    """Loads a checkpoint; returns the steps done, 0 where there is none."""
    if not folder.exists():
        return 0
    tensors, facts = read_tensors(folder, "fit")
    if facts.get("config") != _facts(config):
        raise UserError(f"{folder} belongs to a run with another configuration; give another out, or delete the folder")
    state: Mapping[str, Tensor] = {name.removeprefix("mend."): t for name, t in tensors.items() if name.startswith("mend.")}
    mend.load_state_dict(state)
    for name, p in mend.named_parameters():
        start = f"optimizer.{name}."
        mine = {full.removeprefix(start): tensor for full, tensor in tensors.items() if full.startswith(start)}
        mine = {field: value for field, value in mine.items() if "." not in field}
        if mine:
            optimizer.state[p] = {field: value.to(p.device) if field != "step" else value for field, value in mine.items()}
    return int(facts["step"])
