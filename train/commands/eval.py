"""`omni-train eval FOLDER DATA`: evaluate a model on a data set's questions; `--compare A B` compares two such runs, and
`--turn_ends FOLDER` evaluates its turn head."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omni.checkpoint.places import check_folder
from omni.errors import UserError
from omni.utils.arguments import Parser
from omni.utils.charts import print_table
from omni.utils.process import importing
from train.config.parse import ConfigParser, read_fit_config
from train.console.command import Listing, add_progress, check_folder_to_be, check_least, given_model, given_path
from train.console.progress import counted
from train.data.config import SourceConfig
from train.data.readers import READERS
from train.eval.config import EvalConfig
from train.eval.questions import OWN
from train.eval.run import evaluate

if TYPE_CHECKING:
    from train.eval.measures import Figure
    from train.eval.report import Run


DIGITS = "spoken-digits"
"""The kind of source that `--turn_ends` asks."""


def main(argv: Sequence[str]) -> int:
    """Runs the command; prints the figures and where the files are."""
    names = {argument.partition("=")[0] for argument in argv}
    if "--compare" in names:
        return _compare(argv)
    if "--turn_ends" in names:
        return _evaluate_turn_ends(argv)
    known: Mapping[str, Any] = {**OWN, **READERS}
    formats = "\n".join(f"  {name:<18} {reader.summary}" for name, reader in known.items())
    parser = ConfigParser(
        prog="omni-train eval",
        description="Ask a model the questions of a data set, and report figures with intervals, a picture and every answer.\n"
        "The same command goes on with what was interrupted.\n\n"
        "Two runs side by side: eval --compare OUT_A OUT_B [--out FOLDER]\n"
        "How far a distilled encoder is from its teacher, on recordings alone: eval MODEL DATA --teacher MODEL --out OUT\n"
        "Where questions end, of a model with a turn head: eval --turn_ends MODEL --out FOLDER [--limit N] (and --help)\n\n"
        f"formats:\n{formats}",
        formatter_class=Listing,
    )
    parser.add_argument("model", type=given_model, help="a model folder")
    parser.add_argument("data", type=given_path, help="file or folder of the questions")
    parser.add_argument("--out", type=given_path, required=True, help="folder for the report and the answers")
    parser.add_config(EvalConfig)
    parser.add_argument(
        "--chunks",
        type=str,
        metavar="MS,MS,...",
        help="evaluate once for each length of the encoder's chunks in ms, 0 for whole questions; figures beside the delay",
    )
    parser.add_argument(
        "--teacher",
        type=given_model,
        metavar="MODEL",
        help="ask nothing: measure how far the encoder's frames are from those of this model's, which hears recordings whole",
    )
    add_progress(parser)
    chosen = parser.read(argv)
    config = parser.configuration()
    if chosen["teacher"] is not None:
        return _evaluate_distances(chosen, config)
    if chosen["chunks"] is not None:
        return _evaluate_delays(chosen, config)
    run, figures = evaluate(chosen["model"], chosen["data"], chosen["out"], config, chosen["progress"])
    _show_figures(run, figures)
    return 0


def _milliseconds(text: str) -> list[int]:
    if not re.fullmatch(r"[0-9]{1,6}(,[0-9]{1,6})*", text):
        raise UserError(f"--chunks {text!r} is no list of milliseconds; give some, such as 160,320,640,0")
    return [int(length) for length in text.split(",")]


def _evaluate_delays(chosen: Mapping[str, Any], config: EvalConfig) -> int:
    from train.eval.delays import PICTURE, TABLE, delay_table, evaluate_delays

    out, chunks = chosen["out"], _milliseconds(chosen["chunks"])
    figures = evaluate_delays(chosen["model"], chosen["data"], out, config, chunks, chosen["progress"])
    print_table("figures by delay", *delay_table(figures))
    print(f"table and picture: {out / TABLE}, {out / PICTURE}; each evaluation in a folder beside them")
    return 0


def _evaluate_distances(chosen: Mapping[str, Any], config: EvalConfig) -> int:
    from train.eval.delays import PICTURE, TABLE, delay_table, evaluate_distances

    out, chunks = chosen["out"], _milliseconds(chosen["chunks"]) if chosen["chunks"] else []
    for name in ("model", "teacher"):
        check_folder(chosen[name])
    check_folder_to_be(out, "output folder")
    figures, left_out = evaluate_distances(
        chosen["model"], chosen["teacher"], chosen["data"], out, config, chunks, chosen["progress"]
    )
    print_table("distance from the teacher", *delay_table(figures))
    if left_out:
        print(f"{counted(len(left_out), 'recording')} left out; the first: {left_out[0]}")
    print(f"table and picture: {out / TABLE}, {out / PICTURE}")
    return 0


def _evaluate_turn_ends(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="omni-train eval", description="Evaluate where a model hears questions end, on spoken digits with pauses."
    )
    parser.add_argument("--turn_ends", type=given_model, metavar="MODEL", help="a model folder with a turn head", required=True)
    parser.add_argument("--out", type=given_path, required=True, help="folder for table, figures and picture")
    parser.add_argument(
        "--config", type=given_path, help="YAML file of its run, whose spoken digits are asked (default: beside it)"
    )
    parser.add_argument(
        "--voices",
        metavar="VOICE,VOICE,...",
        help="voices of espeak-ng that ask, unheard in training (default: options.held_out of its run)",
    )
    parser.add_argument("--limit", type=int, default=400, help="how many questions")
    parser.add_argument("--chunk_ms", type=int, help="how much the encoder hears at once (default: as stored)")
    chosen = parser.read(argv)
    check_least(chosen, limit=1)
    model, voices, digits = chosen["turn_ends"], chosen["voices"], None
    check_folder(model)
    file = chosen["config"] or model.parent / "config.yaml"
    if file.is_file():
        data = read_fit_config([str(file)])[0].data
        digits = next((source.made for source in data.sources if hasattr(source.made, "paused_questions")), None)
    if digits is None and voices is None:
        other = f"has no source of kind {DIGITS}: name --voices that training did not have"
        absent = "does not exist; give the run's configuration with --config, or name --voices"
        raise UserError(f"{file} {other if file.is_file() else absent}")
    digits = digits or SourceConfig(DIGITS).made
    with importing():
        from omni.checkpoint.folder import read_config
        from omni.codec.registry import load_if_given
        from omni.generate.listening import TurnListener
        from train.eval.turn_ends import JSON, PICTURE, TABLE, evaluate_turn_ends

    config, listener = read_config(model), TurnListener.from_folder(model)
    if listener is None:
        raise UserError(f"{model} has no turn head: train one with model.turn (and encoder.mode chunked)")
    if chosen["chunk_ms"] is not None:
        listener.encoder.config = config.encoder.with_chunk(chosen["chunk_ms"])
    asking = tuple(voice.strip() for voice in voices.split(",")) if voices else ()
    questions = digits.paused_questions(load_if_given(config.codec, None), chosen["limit"], asking)
    report = evaluate_turn_ends(listener, questions, chosen["out"])
    print_table(f"ends of {chosen['limit']} questions with a pause", *report["table"])
    print(f"table, figures and picture: {', '.join(str(chosen['out'] / name) for name in (TABLE, JSON, PICTURE))}")
    return 0


def _compare(argv: Sequence[str]) -> int:
    parser = Parser(prog="omni-train eval", description="Compare two output folders.")
    parser.add_argument(
        "--compare", nargs=2, type=given_path, metavar=("OUT_A", "OUT_B"), help="two output folders", required=True
    )
    parser.add_argument("--out", type=given_path, help="folder for table and picture (default: compared_with_A in OUT_B)")
    chosen = parser.read(argv)
    with importing():
        from train.eval.report import change_table, compare, write_comparison

    before, after = chosen["compare"]
    comparison = compare(before, after)
    out = chosen["out"] or after / f"compared_with_{before.resolve().name}"
    write_comparison(comparison, out)
    title = f"A {comparison.names[0]}, B {comparison.names[1]}: {comparison.common} questions, differences are B - A"
    print_table(title, *change_table(comparison.changes, "A", "B"))
    for note in comparison.notes:
        print(note)
    print(f"table and picture: {out}")
    return 0


def _show_figures(run: Run, figures: Mapping[str, Figure]) -> None:
    from train.eval.report import REPORT, against_of, change_table, figure_table, group_table, size_lines, turn_table

    print_table(f"{run.answered} questions answered as {run.started['task']}", *figure_table(figures))
    if run.groups:
        print_table(f"by {run.by}", *group_table(run))
    turns = turn_table(run)
    if turns[1]:
        print_table("turns, each after the model's own answers", *turns)
    against = against_of(run)
    if against:
        for line in filter(None, size_lines(run)):
            print(line)
        print_table(f"against {run.started['against']}", *change_table(against, "against", "model"))
    if run.broken:
        first = run.broken[0]
        print(f"broken rows left out: {len(run.broken)}, the first: {first['where']}: {first['broken']}")
    print(f"report, answers and picture: {run.folder} (figures also in {REPORT})")
