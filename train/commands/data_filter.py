"""`omni-train data filter DATA OUT --rules FILE`: keep the rows that rules allow, and say why others are dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from omni.errors import UserError
from omni.utils.charts import print_table
from omni.utils.process import importing
from train.console.options import Parser, add_progress, check_least, given_path
from train.data.inspect.display import add_processes, chosen_processes
from train.data.inspect.filter import DROPPED, filter_rows
from train.data.inspect.rules import read_rules
from train.data.inspect.stats import SHOWN
from train.data.prepare.codecs import Codecs
from train.data.prepare.report import REPORT


def main(argv: Sequence[str]) -> int:
    """Runs the command; prints how many rows are kept, and how many each rule has dropped."""
    parser = Parser(
        prog="omni-train data filter",
        description="Keep the rows that all rules allow, in their order, in a new folder that appears when it is whole; "
        f"its {REPORT} counts what each rule dropped and its {DROPPED} says why for each row.",
    )
    parser.add_argument("data", type=given_path, help="Parquet file or folder of rows")
    parser.add_argument("out", type=given_path, help="folder to make")
    parser.add_argument("--rules", type=given_path, required=True, help="YAML file, see train/data/inspect/rules.py")
    parser.add_argument(
        "--whisper", type=given_path, help="Whisper for the rule max_wer: OpenAI's .pt file or a Hugging Face folder"
    )
    parser.add_argument("--device", type=str, default="cpu", help="where the Whisper computes")
    parser.add_argument("--codec_folder", type=given_path, help="weights of the codec, to hear answers that are codes only")
    parser.add_argument("--shard_mb", type=int, default=256, help="size of a Parquet file in MiB, before compression")
    add_processes(parser)
    add_progress(parser)
    chosen = parser.read(argv)
    check_least(chosen, shard_mb=1)
    rules = read_rules(chosen["rules"])
    if rules.max_wer is not None and chosen["whisper"] is None:
        raise UserError(
            f"{chosen['rules']}: the rule max_wer needs a Whisper: give its weights with --whisper, or leave it out"
        )
    with importing():
        from train.scoring.asr import WhisperTranscriber

    whisper = partial(WhisperTranscriber, chosen["whisper"], chosen["device"]) if rules.max_wer is not None else None
    processes = chosen_processes(chosen, chosen["device"])
    codecs = Codecs(chosen["codec_folder"])
    report = filter_rows(
        chosen["data"], chosen["out"], rules, codecs, whisper, chosen["shard_mb"], chosen["progress"], processes
    )
    show(report, chosen["out"])
    return 0


def show(report: Mapping[str, Any], out: Path) -> None:
    """Prints how many rows were kept."""
    print(f"{report['rows']} of {report['rows'] + report['dropped']} rows kept in {out}")
    for line in report.get("unreadable_files", ())[:SHOWN]:
        print(f"warning: {line}")
    if report["dropped"]:
        rows = [[name, str(count)] for name, count in report["rules"].items()]
        print_table("", ("rule", "rows it drops"), rows)
        print(f"why each row was dropped: {out / DROPPED}")
