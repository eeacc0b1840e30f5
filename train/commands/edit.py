"""`omni-train edit COMMAND ...`: correct single answers of a model (docs/editing.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omni.checkpoint.places import check_folder
from omni.utils.charts import print_table
from omni.utils.process import importing, say
from omni.utils.remote import check_there
from train.config.parse import ConfigParser, file_first
from train.console.command import given_model, given_path, run_subcommand
from train.console.progress import counted
from train.edit.config import ApplyConfig, EditEvalConfig, EditFitConfig, MergeConfig

MODEL, EDITS = "a model folder", "a folder of edits, as `edit apply` writes it"
FACTS, OUT = "JSON lines of corrections (docs/editing.md)", "the folder to write"


def read_command(
    argv: Sequence[str], name: str, description: str, paths: Mapping[str, str], config_class: type = MergeConfig
) -> tuple[list[Path], Any]:
    """Reads the words of a command: its paths, and its configuration.

    Args:
        paths: the paths that it takes, with their help. Those to read are refused (UserError) where they do not exist.
    """
    parser = ConfigParser(prog=f"omni-train edit {name}", description=description)
    for path, text in paths.items():
        parser.add_argument(path, type=given_model if path == "model" else given_path, help=text)
    parser.add_config(config_class)
    values = parser.read(argv)
    for path in paths:
        if path == "model":
            check_folder(values[path])
        elif path != "out":
            check_there(values[path], path, f"{values[path]} does not exist; give {paths[path]}")
    return [values[path] for path in paths], parser.configuration()


def _apply(argv: Sequence[str]) -> int:
    arguments = {"model": MODEL, "facts": FACTS, "out": OUT}
    (model, facts, out), config = read_command(argv, "apply", "Teach a model facts.", arguments, ApplyConfig)
    with importing():
        from train.edit.apply import apply

    taught = apply(model, facts, out, config)
    kl = "" if taught.kl is None else f", divergence on untouched answers {taught.kl:.4f}"
    print(
        f"{out}: {counted(taught.facts, 'fact')} in {counted(len(taught.edits.deltas), 'linear')}, {taught.seconds:.0f} s; "
        f"loss {taught.loss:.4f}{kl}"
    )
    for fact in taught.missed:
        say(f"warning: {fact} was not learned: the edited model answers otherwise; raise finetune.steps, or see `edit eval`")
    print(f"try: omni-infer ask QUESTION --model {model} --edits {out}")
    return 0


def _eval(argv: Sequence[str]) -> int:
    arguments = {"model": MODEL, "edits": EDITS, "facts": FACTS, "out": "folder for report, answers and picture"}
    (model, edits, facts, out), config = read_command(argv, "eval", "Judge edits.", arguments, EditEvalConfig)
    with importing():
        from train.edit.judge import PLOT, REPORT, judge, table_of

    figures = judge(model, edits, facts, out, config)
    print_table("", ("figure", "value", "95 % interval", "questions"), table_of(figures))
    print(f"report, answers and picture: {out} ({REPORT}, {PLOT})")
    return 0


def _merge(argv: Sequence[str]) -> int:
    arguments = {"model": MODEL, "edits": EDITS, "out": OUT}
    (model, edits, out), config = read_command(argv, "merge", "Put edits into the weights of a model.", arguments)
    with importing():
        from train.edit.apply import merge_folder

    names = merge_folder(model, edits, out, config.overwrite)
    print(f"{out}: {model} with the edits of {edits} in {counted(len(names), 'linear')}")
    return 0


def _revert(argv: Sequence[str]) -> int:
    arguments = {"model": "a model folder that `edit merge` wrote", "edits": EDITS, "out": OUT}
    (model, edits, out), config = read_command(argv, "revert", "Take merged edits out again, bit for bit.", arguments)
    with importing():
        from train.edit.apply import revert_folder

    names = revert_folder(model, edits, out, config.overwrite)
    print(f"{out}: {model} without the edits of {edits}; {len(names)} linears are as they were")
    return 0


def _fit(argv: Sequence[str]) -> int:
    _, config = read_command(file_first(argv), "fit", "Learn an editor (MEND) on rows of data.", {}, EditFitConfig)
    with importing():
        from train.edit.fit import fit

    print(f"editor: {fit(config)}")
    return 0


def main(argv: Sequence[str]) -> int:
    """Runs a command on edits; returns the exit code."""
    commands = {
        "apply": (_apply, "teach facts: apply MODEL FACTS.jsonl OUT [--config FILE.yaml] [--any.key value ...]"),
        "eval": (_eval, "do they hold, and does all else stay: eval MODEL EDITS FACTS.jsonl OUT [--config FILE.yaml] [...]"),
        "merge": (_merge, "a model with the edits in its weights: merge MODEL EDITS OUT"),
        "revert": (_revert, "the model as it was before: revert MERGED EDITS OUT"),
        "fit": (_fit, "learn an editor (MEND) on rows of data: fit CONFIG.yaml [--any.key value ...]"),
    }
    return run_subcommand("edit", argv, commands, " Editing itself: docs/editing.md.")
