"""Commands on finished models: `omni-train convert`, `push` and `validate`, read before anything heavy is imported."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from omni.checkpoint.places import ADAPTERS, check_folder
from omni.errors import UserError
from omni.stores.hub import CARD
from omni.tasks import find_task
from omni.utils.arguments import Parser
from omni.utils.hardware import check_device, check_quantize
from omni.utils.process import importing, say
from train.config.parse import ConfigParser, read_fit_config
from train.console.command import check_least, given_model, given_path
from train.console.progress import Bar, duration, shown
from train.convert.options import KINDS, ConvertOptions, check


def run_convert(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    formats = ", ".join(f"{name} ({description})" for name, description in KINDS.items())
    parser = ConfigParser(
        prog="omni-train convert",
        description="`omni-train convert SOURCE TARGET`: convert weights of other projects into a model folder, and out again. "
        f"Kinds: {formats}.",
    )
    parser.add_argument("source", type=given_path, help="a file or folder of weights")
    parser.add_argument("target", type=given_path, help="the folder to write")
    parser.add_config(ConvertOptions)
    values = parser.read(argv)
    source, target, options = values["source"], values["target"], parser.configuration()
    check(source, target, options)
    with importing():
        from train.convert.convert import compare_frames, convert

    started = time.monotonic()
    with closing(Bar(not options.quiet)) as bar:
        description, files = convert(source, target, options, bar)
    size, seconds = sum(f.bytes for f in files.values()), time.monotonic() - started
    print(f"{target}: {description}")
    if difference := compare_frames(source, target, options):
        print(difference)
    for name, stamp in sorted(files.items()):
        print(f"  {name:<28}{stamp.bytes:>16,} bytes   crc32 {stamp.crc32:08x}")
    nonfinite = [tensor for _, stamp in sorted(files.items()) for tensor in stamp.nonfinite]
    if nonfinite:
        listed = nonfinite[0] if len(nonfinite) == 1 else f"{len(nonfinite)} tensors (the first is {nonfinite[0]})"
        print(f"warning: NaN or infinity in {listed}: fetch {source} again, or ask who trained it", file=sys.stderr)
    if (source / ADAPTERS).is_dir():
        print(f"note: {source / ADAPTERS} stays behind: copy it to {target} where its adapters still fit", file=sys.stderr)
    print(f"{size / 1e9:.2f} GB in {duration(seconds)} ({size / 1e6 / max(seconds, 1e-3):.0f} MB/s)")
    return 0


def run_push(argv: Sequence[str]) -> int:
    """Runs the command; prints what is uploaded, and where it is then."""
    parser = Parser(
        prog="omni-train push",
        description="Upload a model folder to the Hugging Face Hub, with its adapters and a model card, in one commit. A token "
        f"is looked for as `hf` does (`hf auth login`, HF_TOKEN). A {CARD} in the folder, and one that was edited at the hub, "
        "are kept; otherwise it is written from the run: model, data, figures. `--dry_run` shows it.",
    )
    parser.add_argument("model", type=given_path, help="a model folder, or the folder of a finished run")
    parser.add_argument("address", help="hf://owner/name, or hf://owner/name@branch; made where it is not there")
    parser.add_argument("--license", default="", help="such as apache-2.0, or other; needed where the folder has no card")
    parser.add_argument("--license_name", default="", help="of a license that the hub does not know (--license other)")
    parser.add_argument("--license_link", default="", help="where its text is")
    parser.add_argument("--language", default="", help="languages that it speaks: en, or en,de (default: of the data's cards)")
    parser.add_argument("--report", type=given_path, nargs="+", help="output folders of `eval`, for the card")
    parser.add_argument("--run", type=given_path, help="folder of the run that made it (default: where the model is)")
    parser.add_argument("--private", action="store_true", help="make a new repository private (default: public)")
    parser.add_argument("--message", default="Upload a model of omni-speech", help="of the commit")
    parser.add_argument("--dry_run", action="store_true", help="show files and card, and upload nothing")
    chosen = parser.read(argv)
    with importing():
        from huggingface_hub import ModelCardData

        from train.hub.push import collect_files, find_folder, hub_address, push

    at, model = hub_address(chosen["address"]), find_folder(chosen["model"])
    if chosen["license"] != "other" and (chosen["license_name"] or chosen["license_link"]):
        raise UserError("--license_name and --license_link are for --license other; the hub knows the others")
    words: dict[str, Any] = {key: chosen[key] or None for key in ("license", "license_name", "license_link")}
    data = ModelCardData(language=[code.strip() for code in chosen["language"].split(",") if code.strip()] or None, **words)
    upload = collect_files(model, at, data, chosen["report"] or (), chosen["run"])
    if chosen["dry_run"]:
        print(f"would upload {model} to {at}:", file=sys.stderr)
        print("\n".join(upload.lines()), file=sys.stderr)
        print(upload.text, end="")
        return 0
    push(upload, chosen["private"], chosen["message"], lambda line: print(line, flush=True))
    print(f'read it by SpeechLM.from_pretrained("{at}"), or --model {at}')
    return 0


def run_validate(argv: Sequence[str]) -> int:
    """Asks a finished model the validation questions of its run, whose `config.yaml` is beside the model folder."""
    parser = Parser(prog="omni-train validate", description=str(run_validate.__doc__))
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
    held_out = held_out_by_source(config.data, lm.codec, plan.questions, broken)
    rows = [row for _, rows in held_out for row in rows]
    items = items_of(rows, plan.tasks, lm.codec, lm.model.config.encoder, broken)
    for why in list((broken or {}).values())[:1]:
        say(f"{len(broken or {})} of the held-out rows are broken and left out (the first: {why})")
    report = evaluate(lm, items, **plan.answering)
    for name, value in report.figures.items():
        print(f"{name.replace('_', ' '):<28}{shown(name, value)}")
    if chosen.answers is not None:
        write_answers(report, chosen.answers)
    return 0
