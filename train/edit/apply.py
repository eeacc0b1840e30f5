"""Computes a model's corrections and writes them as a folder of edits (`omni-train edit apply MODEL FACTS OUT`), merges such
edits into weights, and reverts that (`edit merge MODEL EDITS OUT`, `edit revert MERGED EDITS OUT`).

A merged folder keeps what it replaced in `replaced/<edits>`, so that every one of several edits can be taken out again bit for
bit, the last one first.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from omni.checkpoint.folder import check_full_precision, load_folder, save_folder
from omni.checkpoint.places import CODEC, CONFIG
from omni.edit.deltas import Delta, Edits, edited, find_linears, is_linear, mlp_linears, shape_of, stack, weight_of
from omni.edit.foreign import read_editor
from omni.edit.mend import Mend, load_mend
from omni.edit.storage import load_edits, load_merged, merge, read_tensors, revert, save_edits, save_merged
from omni.errors import UserError
from omni.files import check_replaceable, replacing_folder
from omni.generate.speech_lm import SpeechLM
from omni.tasks import find_task
from omni.utils.arguments import match_names
from train.console.progress import Display, Progress
from train.data.build import build_source
from train.data.config import SourceConfig
from train.data.rows.row import Row
from train.data.seeding import key
from train.edit.config import ApplyConfig, FinetuneConfig
from train.edit.facts import Facts, Synthesiser, fact_rows, plain, read_facts, untouched_rows
from train.edit.lessons import EditExample, EditObjective, draws
from train.scoring.text import normalise


@dataclass(frozen=True)
class ApplyResult:
    """Edits that teach facts, with the time and losses of their training.

    Attributes:
        seconds: of teaching, after the model and the facts were read.
        loss, kl: on the facts and on the untouched questions (None where there were none), in the end.
        missed: places of the facts to which the edited model still writes another answer.
    """

    edits: Edits
    facts: int
    seconds: float
    loss: float
    kl: float | None
    missed: tuple[str, ...] = ()


def apply(model: Path, facts: Path, out: Path, config: ApplyConfig) -> ApplyResult:
    """Teaches a model folder facts, and writes the edits.

    Raises:
        UserError: anything that does not fit; nothing is written then.
    """
    check_replaceable(out, ("edits.json",), overwrite=config.overwrite)
    check_full_precision(model, "editing")
    lm = SpeechLM.from_pretrained(model, config.device, codec_folder=config.codec_folder, kernels="reference")
    loaded = read_facts(facts, lm.tokenizer)
    started = time.monotonic()
    taught = teach(lm, loaded, config, started, "auto")
    extra = {
        "method": config.method,
        "model": str(model),
        "facts": [{"question": f.question_text or f.question_audio, "answer": f.answer_text} for f in loaded.facts],
        "seed": config.seed,
    }
    save_edits(out, taught.edits, extra)
    return taught


def teach(
    lm: SpeechLM, facts: Facts, config: ApplyConfig, started: float | None = None, progress: Progress = "off"
) -> ApplyResult:
    """Computes edits with which the model answers as the facts say; the model itself is not changed."""
    started = time.monotonic() if started is None else started
    for p in lm.model.parameters():
        p.requires_grad_(False)
    mend = _editor(lm.model, config)
    linears = list(mend.shapes) if mend is not None else choose_linears(lm.model, config.linears)
    lessons = EditObjective(lm, linears, config.stream_weights)
    tasks = [task for task in config.tasks if lm.codec is not None or task not in ("A1A2", "T1A2")]
    if not tasks:
        raise UserError(f"tasks {', '.join(config.tasks)} speak, but the model has no codec; give codec_folder, or other tasks")
    speakers = Synthesiser(config.speak, lm.codec, config.seed)
    forms = fact_rows(facts, speakers, config.finetune.each)
    for number, rows in enumerate(forms):
        if all(row.turns[0].lacks(find_task(task)) for row in rows for task in tasks):
            raise UserError(
                f"{facts.where(number)}: it lacks {rows[0].turns[0].lacks(find_task(tasks[0]))} and cannot be asked as "
                f"{', '.join(tasks)}; give its question as these ask, or other tasks"
            )
    taught, kl = lessons.pieces([row for rows in forms for row in rows], tasks), None
    if mend is not None:
        # One fact after another, as the editor was trained: it has never seen a mean gradient of several.
        first = [lessons.pieces(rows[:1], tasks) for rows in fact_rows(facts, speakers, 1, "own")]
        pairs = [(pieces, lessons.pieces(rows, tasks)) for pieces, rows in zip(first, forms, strict=True) if pieces]
        edits = stack([_correction(mend, lm.model, lessons, *pair, config.until) for pair in pairs])
        seconds = time.monotonic() - started
        with torch.no_grad(), edited(lm.model, edits):
            loss = float(lessons.loss(lm.model, taught))
    else:
        others = _untouched(lm, lessons, facts, config, tasks)
        drawn = draws(taught, config.finetune.facts, key(config.seed, "facts"))
        drawn_others = draws(others, config.finetune.others, key(config.seed, "others"))
        loss, kl = math.nan, math.nan if others else None

        def mixed_loss() -> Tensor:
            nonlocal loss, kl
            display.tick(1, 0.0)
            edit = lessons.loss(lm.model, next(drawn))
            loss = float(edit.detach())
            if not others:
                return edit
            divergence = lessons.divergence(lm.model, next(drawn_others))
            kl = float(divergence.detach())
            return edit + config.finetune.kl * divergence

        with closing(Display(config.finetune.steps, mode=progress)) as display:
            edits = finetune(lm.model, mixed_loss, linears, config.finetune)
        seconds = time.monotonic() - started
    return ApplyResult(edits, len(facts.facts), seconds, loss, kl, _missed(lessons, edits, facts, forms, tasks))


STRENGTHS = tuple(2 ** (step / 4) for step in range(-16, 5))
"""Factors of an editor's correction that are tried: a sixteenth to two, four to a doubling."""


def _correction(
    mend: Mend,
    model: nn.Module,
    lessons: EditObjective,
    pieces: list[EditExample],
    forms: list[EditExample],
    until: float | None,
) -> Edits:
    """An editor's correction of a fact asked once, at the least strength that each of its forms needs (`ApplyConfig.until`)."""
    whole = mend.edit(model, pieces, lessons.loss)
    if until is None:
        return whole
    tried = []
    for strength in STRENGTHS:
        edits = whole.scaled(strength)
        with torch.no_grad(), edited(model, edits):
            loss = max(float(lessons.loss(model, [form])) for form in forms)
        tried.append((loss, strength))
        if loss <= until:
            return edits
    return whole.scaled(min(tried)[1])


def _editor(model: nn.Module, config: ApplyConfig) -> Mend | None:
    """Loads the editor: one that `edit fit` has trained, or another project's archive; None where none is configured."""
    if config.editor is None:
        return None
    path = Path(config.editor)
    if path.is_file():
        settings = Path(config.editor_settings) if config.editor_settings is not None else None
        return read_editor(path, model, settings=settings).to(model.device)  # type: ignore[arg-type]
    if config.editor_settings is not None:
        raise UserError(f"editor_settings {config.editor_settings!r} are of an archive, but the editor {path} is none")
    return load_mend(path).to(model.device)  # type: ignore[arg-type]


def choose_linears(model: nn.Module, patterns: tuple[str, ...]) -> list[str]:
    """Linears by pattern, in the model's order; UserError where a pattern matches none (the closest names are given)."""
    if not patterns:
        return mlp_linears(model, min(3, len(model.decoder.blocks)))  # type: ignore[union-attr, arg-type]
    names = [name for name, part in model.named_modules() if is_linear(part)]
    chosen = match_names(patterns, names, "linears", noun="linear")
    return [name for name in names if name in chosen]


def draw_untouched(source: SourceConfig, lm: SpeechLM, facts: Facts, count: int, seed: int) -> list[Row]:
    """Draws rows of a source whose questions are not among those to change."""
    asked = facts.asked()
    out: list[Row] = []
    made = build_source(source, lm.codec, key(seed, "untouched"))
    for index in range(4 * count if made.size is None else made.size):
        if len(out) == count:
            break
        row = made.row(index)
        if plain(row.turns[0].question_text) not in asked:
            out.append(row)
    return out


def _untouched(lm: SpeechLM, lessons: EditObjective, facts: Facts, config: ApplyConfig, tasks: list[str]) -> list[EditExample]:
    """Questions whose answers are to stay, with the model's own answers and logits before the edit."""
    rows = untouched_rows(facts, Synthesiser(config.speak, lm.codec, config.seed))
    if config.untouched is not None:
        rows += draw_untouched(config.untouched, lm, facts, config.untouched_count, config.seed)
    if not rows or config.finetune.kl == 0 or config.finetune.others == 0:
        return []
    answered = lessons.own_answers(rows, tasks)
    return lessons.stay([piece for row in answered for piece in lessons.pieces([row], [row.task])])


# --- fine-tuning ------------------------------------------------------------------------------------------------------


def finetune(model: nn.Module, loss_of: Callable[[], Tensor], linears: Iterable[str], config: FinetuneConfig) -> Edits:
    """Adam on changes of the linears, dense [I, O] or of low rank, projected into a bound after each step (Zhu et al. 2020,
    arXiv 2012.00363).

    Deltas are trained in activation space: no weight and no parameter's `grad` is touched. Returns the edit, without graph,
    signed for the model. UserError: a name is no linear of the model, or the loss depends on none of them."""
    parts = find_linears(model, linears)
    random = torch.Generator().manual_seed(config.seed)
    edits = Edits({name: _nothing(part, config.rank, random) for name, part in parts.items()})
    learning = [tensor for delta in edits.deltas.values() for tensor in (delta.a, delta.b) if tensor is not None]
    optimizer = torch.optim.Adam(learning, lr=config.lr)
    reached = False
    for _ in range(config.steps):
        with torch.enable_grad(), edited(model, edits):
            loss = loss_of()
            if float(loss.detach()) < config.enough:
                reached = True
                break
            if not loss.requires_grad:  # this forward pass used none of the linears
                continue
            loss.backward(inputs=learning)
        reached = reached or any(tensor.grad is not None for tensor in learning)
        optimizer.step()
        optimizer.zero_grad()
        project(list(edits.deltas.values()), config.norm, config.bound)
    if not reached:
        raise UserError(f"the loss does not depend on what {', '.join(parts)} put out; choose other linears or tasks")
    return edits.map(lambda change: change.detach().clone()).signed(model)


def _nothing(part: nn.Module, rank: int | None, random: torch.Generator) -> Delta:
    """Initialises a delta that changes nothing yet."""
    (inputs, outputs), device = shape_of(part), weight_of(part).device
    if rank is None:
        return Delta(torch.zeros(inputs, outputs, device=device, requires_grad=True))
    a = torch.randn(rank, inputs, generator=random) / inputs**0.5
    return Delta(torch.zeros(rank, outputs, device=device, requires_grad=True), a.to(device).requires_grad_())


@torch.no_grad()
def project(deltas: Sequence[Delta], norm: Literal["linf", "l2"], bound: float) -> None:
    """Projects changes to the nearest ones within the bound, in place; those of low rank (l2 alone) by scaling their b."""
    if norm == "linf":
        for delta in deltas:
            delta.b.clamp_(-bound, bound)
        return
    # |a.T b|^2 = sum of (a a.T) * (b b.T)
    squares = [d.b.double().square() if d.a is None else (d.a @ d.a.T) * (d.b @ d.b.T) for d in deltas]
    square = sum(float(each.sum()) for each in squares)
    if square > bound**2:
        for delta in deltas:
            delta.b.mul_(bound / square**0.5)


def _missed(lessons: EditObjective, edits: Edits, facts: Facts, forms: list[list[Row]], tasks: list[str]) -> tuple[str, ...]:
    """Places of the facts to whose first form the edited model answers otherwise, as any of the tasks that it can be asked."""
    asked = [
        (i, rows[0], task) for i, rows in enumerate(forms) for task in tasks if not rows[0].turns[0].lacks(find_task(task))
    ]
    with lessons.lm.edited(edits):
        answers = lessons.answers([row for _, row, _ in asked], [task for *_, task in asked])
    pairs = zip(asked, answers, strict=True)
    wrong = {i for (i, row, _), answer in pairs if normalise(answer.text) != normalise(row.turns[0].answer_text)}
    return tuple(facts.where(number) for number in sorted(wrong))


REPLACED = "replaced"


def merge_folder(model: Path, edits: Path, out: Path, overwrite: bool = False) -> list[str]:
    """Write a model folder with edits in its weights; returns the names of the linears that changed. UserError for edits of
    another model, or that are in its weights already."""
    replaced = _replaced(model, edits, out, overwrite)
    if replaced.is_dir():
        raise UserError(f"{edits} is merged into {model} already; to take it out: omni-train edit revert {model} {edits} OUT")
    loaded = load_folder(model)
    corrections = load_edits(edits, loaded.model)
    merged = merge(loaded.model, corrections)
    with replacing_folder(out) as folder:
        _write(folder, model, loaded)
        save_merged(folder / REPLACED / replaced.name, merged)
    return list(corrections.deltas)


def revert_folder(model: Path, edits: Path, out: Path, overwrite: bool = False) -> list[str]:
    """Writes a model folder without edits that were merged, bit for bit as before; returns the names of the linears.
    UserError where they never were, or the weights have changed since."""
    replaced, loaded = _replaced(model, edits, out, overwrite), load_folder(model)
    if not replaced.is_dir():
        raise UserError(
            f"{edits} was never merged into {model}, so there is nothing to revert; give the folder that was merged"
        )
    merged = load_merged(replaced)
    revert(loaded.model, merged)
    with replacing_folder(out) as folder:
        _write(folder, model, loaded)
        shutil.rmtree(folder / REPLACED / replaced.name)
        if not any((folder / REPLACED).iterdir()):
            (folder / REPLACED).rmdir()
    return list(merged.after)


def _replaced(model: Path, edits: Path, out: Path, overwrite: bool) -> Path:
    """The folder of what edits replaced in a model folder, there or not, named by the checksum of their tensors. UserError for
    an output that is taken, a model that is quantised, or a folder that holds no edits."""
    check_replaceable(out, (CONFIG,), (model,), overwrite=overwrite)
    check_full_precision(model, "merging")
    _, facts = read_tensors(edits, "edits")
    return model / REPLACED / f"{facts['tensors']['crc32']:08x}"


def _write(folder: Path, model: Path, loaded: Any) -> None:
    """Writes a model folder like another one, with the loaded weights; what earlier edits replaced is kept."""
    codec = model / CODEC if (model / CODEC).is_dir() else None
    save_folder(folder, loaded.config, loaded.model.state_dict(), loaded.tokenizer, codec_folder=codec, extra=loaded.extra)
    if (model / REPLACED).is_dir():
        shutil.copytree(model / REPLACED, folder / REPLACED)
