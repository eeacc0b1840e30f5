"""`omni-train validate`: ask a finished model the validation questions of its own run again."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

from omni.checkpoint.places import check_folder
from omni.errors import UserError
from omni.tasks import find_task
from omni.utils.hardware import check_device, check_quantize
from omni.utils.process import importing, say
from train.config.parse import read_fit_config
from train.console.options import Parser, check_least, given_model, given_path
from train.console.progress import shown


def main(argv: Sequence[str]) -> int:
    """Asks a finished model the validation questions of its run, whose `config.yaml` is beside the model folder."""
    parser = Parser(prog="omni-train validate", description=main.__doc__)
    parser.add_argument("model", type=given_model, help="a model folder")
    parser.add_argument("--config", type=given_path, help="YAML file of the run whose held-out questions are asked")
    parser.add_argument("--limit", type=int, help="how many questions (default: as the configuration says)")
    parser.add_argument("--tasks", type=str, nargs="+", help="what they are asked as, such as A1A2 A1T1")
    parser.add_argument("--device", type=str, default="cpu")
    parser.add_argument("--quantize", type=str, help="int8: linears and tables in int8, on a CPU")
    parser.add_argument("--answers", type=given_path, help="write every answer to this JSON lines file")
    chosen = Namespace(**parser.read(argv))
    check_least(vars(chosen), limit=1)
    check_device(chosen.device)
    check_quantize(chosen.quantize, chosen.device)
    check_folder(chosen.model)
    file = chosen.config or chosen.model.parent / "config.yaml"
    if not file.is_file():
        raise UserError(f"{file} does not exist; give the run's configuration with --config")
    config, _ = read_fit_config([str(file)])
    plan = config.validation
    if chosen.limit is not None:
        plan = replace(plan, questions=chosen.limit)
    if chosen.tasks is not None:
        plan = replace(plan, tasks=tuple(find_task(name, "--tasks").name for name in chosen.tasks))
    with importing():
        from omni.generate.speech_lm import SpeechLM
        from train.data.build import held_out_by_source
        from train.eval.held_out import evaluate, items_of, write_answers

    lm = SpeechLM.from_pretrained(chosen.model, device=chosen.device, quantize=chosen.quantize, kernels="reference")
    broken = dict[str, str]() if config.data.broken == "skip" else None
    found = held_out_by_source(config.data, lm.codec, plan.questions, broken)
    rows = [row for _, rows in found for row in rows]
    items = items_of(rows, plan.tasks, lm.codec, lm.model.config.encoder, broken)
    for why in list((broken or {}).values())[:1]:
        say(f"{len(broken or {})} of the held-out rows are broken and left out (the first: {why})")
    report = evaluate(lm, items, rows=plan.rows, max_seconds=plan.max_seconds)
    for name, value in report.figures.items():
        print(f"{name.replace('_', ' '):<28}{shown(name, value)}")
    if chosen.answers is not None:
        write_answers(report, chosen.answers)
    return 0
