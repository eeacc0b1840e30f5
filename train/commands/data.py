"""`omni-train data COMMAND ...`: prepare, validate, describe, listen to and filter data."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omni.checkpoint.places import CODEC, CONFIG
from omni.errors import UserError
from omni.files import write_json
from omni.stores.reading import local_path
from omni.tasks import find_task
from omni.utils.arguments import Parser
from omni.utils.charts import print_table
from omni.utils.hardware import cores
from omni.utils.process import importing
from omni.utils.remote import spelled
from train.config.parse import ConfigParser
from train.console.command import Listing, add_progress, check_least, given_model, given_path, run_subcommand
from train.console.progress import counted, duration
from train.data.inspect.checks import KINDS, Bounds, Codecs, Findings
from train.data.inspect.filter import DROPPED, filter_rows, read_rules
from train.data.inspect.listen import draw, find_row, own_folder, sounds
from train.data.inspect.scan import Scan, add_processes, add_target, chosen_processes, chosen_target
from train.data.inspect.validate import Summary, report, validate
from train.data.prepare.prepare import prepare
from train.data.prepare.rows import PrepareConfig
from train.data.prepare.shards import REPORT, summary, untaken
from train.data.readers import READERS
from train.data.rows.reference import checksum

if TYPE_CHECKING:
    from train.data.inspect.stats import Collected, Group


def run_prepare(argv: Sequence[str]) -> int:
    """Runs the command; prints what was made, and how long it took."""
    formats = "\n".join(f"  {name:<18} {reader.summary}" for name, reader in READERS.items())
    parser = ConfigParser(
        prog="omni-train data prepare",
        description="Read a data set, speak and encode what is missing, and store the rows as Parquet files in a folder,\n"
        "which appears when it is whole. The same command goes on with what was interrupted.\n"
        "With --shard i/n it makes one of n parts, each in a folder of its own.\n\nformats:\n" + formats,
        formatter_class=Listing,
    )
    parser.add_argument("source", type=given_path, help="file or folder of the data set")
    parser.add_argument("out", type=given_path, help="folder to make")
    parser.add_config(PrepareConfig)
    add_progress(parser)
    chosen = parser.read(argv)
    config = parser.configuration()
    start = time.monotonic()
    done = prepare(chosen["source"], chosen["out"], config, chosen["progress"])
    print(summary(done, chosen["out"]))
    if chosen["progress"] != "off":
        print(f"took {duration(time.monotonic() - start)}", file=sys.stderr)
    return 0


def run_answers(argv: Sequence[str]) -> int:
    """Runs the command; prints how many rows were answered, and why others were not."""
    parser = Parser(
        prog="omni-train data answers",
        description="Let a model answer the questions' texts (T1T2): what it writes becomes the rows' answers, all else is "
        "kept, so that it learns to answer speech as it answers writing. Rows whose answer has no end are left out and "
        "counted. The folder appears when it is whole; the same command goes on with what was interrupted.",
    )
    parser.add_argument("model", type=given_model, help="the model folder that answers")
    parser.add_argument("data", type=given_path, help="prepared rows, or any data that `data prepare` reads")
    parser.add_argument("out", type=given_path, help="folder to make")
    parser.add_argument("--max_tokens", type=int, default=128, help="most tokens of an answer, its end included")
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0 answers are drawn")
    parser.add_argument("--rows", type=int, default=32, help="questions that are answered side by side")
    parser.add_argument("--device", type=str, default="cpu", help="where the model answers")
    parser.add_argument("--dtype", type=str, help="number format of the weights, such as bfloat16; as they are stored")
    parser.add_argument("--quantize", type=str, help="int8: linears and tables in int8, on a CPU")
    add_progress(parser)
    chosen = parser.read(argv)
    check_least(chosen, max_tokens=1, rows=1)
    with importing():
        from omni.generate.speech_lm import SpeechLM
        from train.data.prepare.answers import AnsweredSource

    lm = SpeechLM.from_pretrained(chosen["model"], chosen["device"], chosen["dtype"], quantize=chosen["quantize"])
    names = ("max_tokens", "temperature", "dtype", "quantize")
    decided = {"model_checksum": checksum(local_path(chosen["model"]) / CONFIG), **{name: chosen[name] for name in names}}
    config = PrepareConfig(question_rate=0, recordings="reference", workers=0, threads=cores())
    with closing(AnsweredSource(lm, chosen["rows"], chosen["max_tokens"], temperature=chosen["temperature"])) as answers:
        done = prepare(chosen["data"], chosen["out"], config, chosen["progress"], answers.open, decided)
    print(summary(done, chosen["out"]))
    return 0


def run_validate(argv: Sequence[str]) -> int:
    """Runs the command; returns 1 where an error was found, 0 where at most warnings were."""
    parser = ConfigParser(
        prog="omni-train data validate",
        description="Find what is wrong with rows: format, codes, recordings, texts, duplicates, and what other data has too. "
        "Exit code 1 where there are errors; warnings do not count.",
    )
    parser.add_argument("data", type=given_path, help="Parquet file or folder of rows")
    parser.add_argument("--against", type=given_path, nargs="+", default=[], help="other splits, which must share nothing")
    parser.add_argument("--codec_folder", type=given_path, help="weights of the codec, where it is a special one")
    parser.add_argument("--report", type=given_path, help="write counts and examples to this JSON file")
    parser.add_argument("--findings", type=given_path, help="write every finding to this JSON lines file")
    parser.add_argument("--examples", type=int, default=3, help="how many of a kind are shown")
    parser.add_config(Bounds)
    add_processes(parser)
    add_progress(parser)
    chosen = parser.read(argv)
    bounds = parser.configuration()
    check_least(chosen, examples=0)
    codecs = Codecs(chosen["codec_folder"])
    processes = chosen_processes(chosen)
    if chosen["findings"] is not None:
        chosen["findings"].parent.mkdir(parents=True, exist_ok=True)
    with nullcontext() if chosen["findings"] is None else open(chosen["findings"], "w", encoding="utf-8") as stream:
        findings = Findings(chosen["examples"], stream)
        summary = validate(chosen["data"], chosen["against"], bounds, codecs, findings, chosen["progress"], processes)
    show_findings(summary, chosen["data"])
    if chosen["report"] is not None:
        chosen["report"].parent.mkdir(parents=True, exist_ok=True)
        write_json(chosen["report"], report(summary, chosen["data"], chosen["against"], bounds))
    return 1 if findings.of("error") else 0


def show_findings(summary: Summary, data: Path) -> None:
    """Prints the findings on standard output."""
    findings = summary.findings
    print(f"{summary.rows} of {summary.total} rows of {spelled(data)} read, {duration(3600 * summary.hours)} of sound")
    if summary.prepared.get("items"):
        kept, broken = summary.prepared["rows"], summary.prepared["broken"]
        print(f"prepared of {counted(summary.prepared['items'], 'item')}: {counted(kept, 'row')}, {broken} made none")
        print(untaken(summary.prepared), end="\n" * bool(untaken(summary.prepared)))
    if not findings.counts:
        print("nothing found")
        return
    rows = [[name, KINDS[name].severity, str(findings.counts[name]), KINDS[name].description] for name in findings.kinds()]
    print_table("", ("finding", "severity", "count", "what it is"), rows)
    for name in findings.kinds():
        for where, text in findings.shown[name]:
            print(f"{KINDS[name].severity} {name}: {where}: {text}")
        rest = findings.counts[name] - len(findings.shown[name])
        if rest > 0 and findings.shown[name]:
            print(f"  and more of {name}")
    print(f"{counted(findings.of('error'), 'error')}, {counted(findings.of('warning'), 'warning')}")


def run_filter(argv: Sequence[str]) -> int:
    """Runs the command; prints how many rows are kept, and how many each rule has dropped."""
    parser = Parser(
        prog="omni-train data filter",
        description="Keep the rows that all rules allow, in their order, in a new folder that appears when it is whole; "
        f"its {REPORT} counts what each rule dropped and its {DROPPED} says why for each row.",
    )
    parser.add_argument("data", type=given_path, help="Parquet file or folder of rows")
    parser.add_argument("out", type=given_path, help="folder to make")
    parser.add_argument("--rules", type=given_path, required=True, help="YAML file, see train/data/inspect/filter.py")
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
        from train.scoring.asr import WhisperASR

    whisper = partial(WhisperASR, chosen["whisper"], chosen["device"]) if rules.max_wer is not None else None
    processes = chosen_processes(chosen, chosen["device"])
    codecs = Codecs(chosen["codec_folder"])
    report = filter_rows(
        chosen["data"], chosen["out"], rules, codecs, whisper, chosen["shard_mb"], chosen["progress"], processes
    )
    print(f"{report['rows']} of {report['rows'] + report['dropped']} rows kept in {chosen['out']}")
    for line in report.get("unreadable_files", ())[:12]:
        print(f"warning: {line}")
    if report["dropped"]:
        print_table("", ("rule", "rows it drops"), [[name, str(count)] for name, count in report["rules"].items()])
        print(f"why each row was dropped: {chosen['out'] / DROPPED}")
    return 0


def run_stats(argv: Sequence[str]) -> int:
    """Runs the command; prints tables, and writes pictures and a report where a folder is given."""
    parser = Parser(
        prog="omni-train data stats",
        description="Count rows, turns, hours and lengths, by source, language, speaker and task, and how codes are used; for "
        "a model also tokens and the columns of its examples. Recordings are not decoded: their headers say how long they are.",
    )
    parser.add_argument("data", type=given_path, help="Parquet file or folder of rows")
    parser.add_argument("--out", type=given_path, help="write stats.json and the pictures to this folder")
    add_target(parser)
    parser.add_argument("--tasks", type=str, nargs="+", default=["A1A2"], help="tasks whose columns are counted, for a model")
    parser.add_argument("--codec_folder", type=given_path, help="weights of the codec, where it is a special one")
    add_processes(parser)
    add_progress(parser)
    chosen = parser.read(argv)
    scan, processes = Scan(chosen["data"]), chosen_processes(chosen)
    with importing():
        from train.data.inspect.stats import STATS, collect, draw_all, plain

    target, codecs = chosen_target(chosen), Codecs(chosen["codec_folder"])
    tasks = tuple(find_task(name, "--tasks") for name in chosen["tasks"]) if target is not None else ()
    collected = collect(scan, codecs, target, tasks, chosen["progress"], processes)
    if collected.damaged and not collected.all.rows:
        raise UserError(collected.damaged[0])
    show_stats(collected)
    out, context = chosen["out"], target.config.decoder.context if target is not None else 0
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / STATS, plain(collected, chosen["data"]))
        print(f"wrote {', '.join(str(file) for file in [out / STATS, *draw_all(collected, out, context)])}")
    return 0


def show_stats(collected: Collected) -> None:
    """Prints the tables on standard output."""
    from train.data.inspect.stats import COLUMNS, SHOWN, codebook_use, summary

    whole = collected.all
    print(
        f"{counted(whole.rows, 'row')}, {counted(whole.turns, 'turn')}, {duration(whole.question_seconds)} of spoken "
        f"questions, {duration(whole.answer_seconds)} of spoken answers"
    )
    for name, count in sorted(collected.noted.items()):
        if count:
            print(f"{count} {name}")
    for message in collected.damaged[:SHOWN]:
        print(f"warning: {message}")
    for name, groups in collected.groups.items():
        if set(groups) - {""}:
            _show_groups(name, groups)
    _show_texts(collected)
    summaries = {name: summary(values) for name, values in collected.samples.items()}
    rows = [[name, str(of["count"]), *(f"{of[column]:.4g}" for column in COLUMNS)] for name, of in summaries.items()]
    if rows:
        print_table("lengths; spaces are no characters", ("", "count", *COLUMNS.values()), rows)
    for codec, streams in collected.codes.items():
        cells = []
        for i, (counts, use) in enumerate(zip(streams, map(codebook_use, streams), strict=True)):
            most, first = math.log2(max(1, use["codes"])), counts.max(initial=0) / max(1, use["frames"])
            figures = f"{100 * use['used']:.1f}", f"{use['entropy']:.2f}", f"{most:.2f}", f"{100 * first:.1f}"
            cells.append([f"audio{i}", str(use["codes"]), *figures])
        print_table(f"codes of {codec}", ("stream", "codes", "used %", "entropy, bits", "at most", "most frequent %"), cells)


def _show_texts(collected: Collected) -> None:
    from train.data.inspect.stats import TEXT_COLUMNS

    rows = []
    for side, counts in collected.texts.items():
        plain = counts.plain()
        spoken = collected.samples.get(f"{side} seconds")
        mean = f"{sum(spoken) / len(spoken):.2f}" if spoken else ""
        if plain["texts"]:
            rows.append([f"{side}s", *(str(plain[name]) for name in TEXT_COLUMNS), mean])
    if rows:
        print_table("texts and their words", ("", *TEXT_COLUMNS.values(), "mean seconds"), rows)


def _show_groups(name: str, groups: dict[str, Group]) -> None:
    from train.data.inspect.stats import SHOWN

    order = sorted(groups.items(), key=lambda group: (-group[1].rows, group[0]))
    rows = [
        [value or "(none)", str(of.rows), str(of.turns), duration(of.question_seconds), duration(of.answer_seconds)]
        for value, of in order[:SHOWN]
    ]
    more = f" ({len(order)}, the {SHOWN} largest)" if len(order) > SHOWN else ""
    print_table(f"by {name}{more}", (name, "rows", "turns", "questions", "answers"), rows)


def run_listen(argv: Sequence[str]) -> int:
    """Runs the command; writes WAV files and prints what the row holds."""
    parser = Parser(
        prog="omni-train data listen",
        description="Write a row's question and answer as WAV files, the answer also as its codes sound where the codec is at "
        "hand, and draw its prompt and targets as a model is shown them: `*` marks targets, `~` what is heard, `.` is pad.",
    )
    parser.add_argument("data", type=given_path, help="Parquet file or folder of rows")
    parser.add_argument("row", type=str, help="its number in the data, FILE:ROW with the number in that file, or its id")
    parser.add_argument(
        "--out", type=given_path, help="folder for the WAV files; listen-DATA-ROW in this one where none is named"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace files of other sounds that are there")
    add_target(parser)
    parser.add_argument("--task", type=str, help="what it is drawn as; the row's own or the first that fits")
    parser.add_argument("--columns", type=int, default=24, help="time steps that are drawn at either end of a long example")
    parser.add_argument("--codec_folder", type=given_path, help="weights of the codec; by default those in the model's folder")
    chosen = parser.read(argv)
    check_least(chosen, columns=1)
    own = chosen["model"] / CODEC if chosen["model"] is not None else None
    codecs = Codecs(chosen["codec_folder"] or (own if own is not None and own.is_dir() else None))
    scan, target = Scan(chosen["data"]), chosen_target(chosen)
    row = find_row(scan, chosen["row"])
    fields = ("id", "source", "language", "speaker", "task")
    print(f"{row.where}: " + ", ".join(f"{name} {getattr(row, name)!r}" for name in fields))
    out = chosen["out"] or own_folder(scan.path, chosen["row"])
    for line in sounds(row, out, codecs, chosen["overwrite"]):
        print(line)
    if target is not None:
        print(draw(row, target, codecs, chosen["task"], chosen["columns"]))
    return 0


def main(argv: Sequence[str]) -> int:
    """Runs a command on data; returns the exit code."""
    commands = {
        "prepare": (run_prepare, "a data set as rows to train on: prepare SOURCE OUT [--codec NAME ...]"),
        "answers": (run_answers, "a model's own answers as those of rows: answers MODEL DATA OUT"),
        "validate": (run_validate, "find what is wrong with rows: validate DATA"),
        "stats": (run_stats, "lengths, speakers, texts in tables and plots: stats DATA"),
        "listen": (run_listen, "one row as sound and text: listen DATA ROW"),
        "filter": (run_filter, "keep the rows that rules allow: filter DATA OUT --rules FILE"),
    }
    return run_subcommand("data", argv, commands)
