"""Runs an evaluation, or continues one that was interrupted."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni.checkpoint.places import check_folder
from omni.errors import UserError
from omni.files import locked
from omni.stores.reading import local_path
from omni.tasks import Task, find_task
from omni.utils.process import importing
from train.console.command import check_folder_to_be
from train.console.progress import Progress
from train.data.readers import data_path
from train.eval.config import EvalConfig
from train.eval.journal import claim, read_records
from train.eval.questions import Questions, choose_task, fingerprint, open_data

if TYPE_CHECKING:
    from train.eval.measures import Figure
    from train.eval.report import Run


def evaluate(
    model: Path, data: Path, out: Path, config: EvalConfig, progress: Progress = "auto"
) -> tuple[Run, dict[str, Figure]]:
    """Evaluates a model folder on data, into the folder `out`; the same evaluation that was interrupted there is continued.
    UserError for settings that do not fit, an output of something else, or no question that could be asked."""
    if data.is_dir() and out.resolve().is_relative_to(data.resolve()):
        raise UserError(f"output folder {out} lies in the data {data}, which it would change: name one outside with --out")
    check_folder_to_be(out, "output folder")
    questions = Questions.spread(open_data(data, config.read), config.limit)
    check_folder(model)
    if config.against is not None:
        check_folder(Path(config.against))
    with importing():
        from omni.generate.speech_lm import SpeechLM
        from train.eval import against, answers, report
        from train.scoring.asr import open_asr

    loading: dict[str, Any] = {"device": config.device, "codec_folder": config.codec_folder, "kernels": "reference"}
    own: dict[str, Any] = {"dtype": config.dtype, "quantize": config.quantize, "chunk_ms": config.chunk_ms}
    lm, other = SpeechLM.from_pretrained(model, **loading, **own), None
    if config.against is not None:
        other = SpeechLM.from_pretrained(config.against, **loading)
        against.check_alike(lm, other, Path(config.against))
    asked = choose_task(questions, lm, config.asr is not None) if config.task is None else find_task(config.task)
    task = lm.config.answers(asked)
    asr = open_asr(config.asr, config.asr_words, config.asr_longest, config.device)
    if asr is not None and not (task.audio and lm.codec is not None):
        why = f"{model} has no codec weights (give --codec_folder)" if task.audio else f"{task.name} writes only"
        raise UserError(f"there is no speech for --asr to recognise: {why}; leave --asr out")
    if config.turns and not task.text:
        raise UserError(f"--turns compares texts, and {task.name} writes none: give another --task, or leave --turns out")
    asked_aloud = task.question == "audio" and task.text and task.writes == "answer"
    text_only = config.text or config.text_before is not None
    if text_only:
        against.check_texts(questions, answered=not asked_aloud or config.text_before is not None)
    if config.text_before is not None:
        against.check_before(Path(config.text_before), lm.tokenizer, questions)
    with locked(out):
        claim(out, _started(model, data, questions, task, config, None if asr is None else asr.name))
        answers.answer_all(lm, questions, task, config, asr, out / report.ANSWERS, progress)
        said = {r["index"]: r["response"] for r in read_records(out / report.ANSWERS) if "broken" not in r}
        answered = list(said)
        if config.timed and answered:
            answers.time_some(lm, questions, answered, task, config, out / report.TIMINGS, progress)
        if config.turns:
            answers.answer_turns(lm, questions, task, config, out / report.TURNS, progress)
        if other is not None:
            answers.answer_all(other, questions, task, config, asr, out / report.OTHERS, progress)
            if answered:
                against.compare_some(lm, other, questions, answered, task, config, out / report.AGAINST, progress)
        if text_only:
            against.score_texts(lm, questions, config, out / report.TEXT, progress, said if asked_aloud else {})
        if config.text_before is not None:
            del lm, other  # the one before may be as large
            before = against.load_before(Path(config.text_before), config.device)
            against.score_texts(before, questions, config, out / report.TEXT_BEFORE, progress)
        run = report.Run.read(out, config.by)
        if not run.answered:
            raise UserError(
                f"none of the {len(questions)} questions could be asked; the first: {run.broken[0]['where']}: "
                f"{run.broken[0]['broken']}"
            )
        figures = report.write_report(run)
        report.draw_report(run, figures)
    return run, figures


def _started(model: Path, data: Path, questions: Questions, task: Task, config: EvalConfig, asr: str | None) -> dict[str, Any]:
    """The model, data, task, settings and plug-ins' metrics that identify this evaluation."""
    from train.eval.measures import MEASURES

    metrics = [name for name, measure in MEASURES.items() if measure.score is not None]
    against = Path(config.against) if config.against is not None else None
    named = {} if against is None else {"against": str(against), "against_hash": model_hash(against)}
    return named | {
        "model": str(model),
        "model_hash": model_hash(model),
        "data": str(data),
        "data_hash": fingerprint(data_path(data)),
        "format": questions.source.format,
        "items": len(questions),
        "task": task.name,
        "ear": asr,
        "device": config.device,
        "settings": config.deciding() | ({"metrics": metrics} if metrics else {}),
        "text_before": config.text_before,
        "text_before_hash": None if config.text_before is None else fingerprint(Path(config.text_before)),
    }


def model_hash(folder: Path) -> str:
    """Hash of the model folder's `config.json`, which holds the checksums of its other files."""
    return hashlib.sha256((local_path(folder) / "config.json").read_bytes()).hexdigest()[:16]
