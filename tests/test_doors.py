"""Both command lines in real processes: closed and full streams, encodings, odd names, what nobody foresaw."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from omni.errors import UserError, in_one_line
from omni.generate.options import NUMBERS, check_numbers
from omni.utils import process

ROOT = Path(__file__).parent.parent
DOORS = {"infer": ["-m", "infer"], "train": ["-m", "train"]}
HELP = {"infer": ["ask", "--help"], "train": ["--help"]}
FULL = "/dev/full"


def call(
    words: list[str], place: Path, redirect: str = "", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A command line in a shell, so that streams can be closed; no time is spent on anything heavy."""
    line = [sys.executable, *words]
    around = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"} | (env or {})
    script = f'exec "$@" {redirect}'
    return subprocess.run(
        ["sh", "-c", script, "sh", *line], cwd=place, env=around, capture_output=True, text=True, errors="surrogateescape"
    )


def one_line(text: str, *parts: str) -> None:
    assert text.startswith("error: ") and text.count("\n") == 1, text
    for part in parts:
        assert part in text, text


@pytest.mark.sampled(1)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.skipif(not os.path.exists(FULL), reason="no /dev/full here")
def test_a_full_standard_output_is_one_line_and_code_1(door: str, tmp_path: Path) -> None:
    done = call([*DOORS[door], *HELP[door]], tmp_path, f">{FULL}")
    assert done.returncode == 1
    one_line(done.stderr, "No space left on device")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("door", DOORS)
def test_closed_streams_break_nothing(door: str, closed: str, tmp_path: Path) -> None:
    done = call([*DOORS[door], *HELP[door]], tmp_path, closed)
    assert done.returncode == 0 and done.stderr == ""
    assert ("usage" in done.stdout.lower()) == (">&-" not in closed.replace("2>&-", ""))
    wrong = call([*DOORS[door], "nonsense"], tmp_path, closed)
    assert wrong.returncode == 2
    if "2>&-" not in closed:
        one_line(wrong.stderr, "'nonsense' is unknown")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("env", [{"PYTHONIOENCODING": "ascii"}, {"LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
@pytest.mark.parametrize("door", DOORS)
def test_names_that_are_not_text_are_printed_in_every_encoding(door: str, env: dict[str, str], tmp_path: Path) -> None:
    name = os.fsdecode(b"fr\xe9mi-\xc3\xa9.wav")
    words = ["ask", name] if door == "infer" else [name]
    done = call([*DOORS[door], *words], tmp_path, env=env)
    assert done.returncode == 2
    one_line(done.stderr, "mi-")


@pytest.mark.usefixtures("terminal_signals")
def test_signals_that_are_ignored_stay_so_and_others_end_in_order(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from omni.utils.process import all_imported, lead\n"
        "def main():\n"
        "    all_imported()\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGHUP); print('went on', flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGTERM); print('not reached')\n"
        "    finally:\n"
        "        os.kill(os.getpid(), signal.SIGTERM); print('closed', flush=True)\n"
        "lead(main)\n"
    )
    done = call(["-c", code], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGHUP, "closed\n", "")
    ignoring = subprocess.run(
        ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", sys.executable, "-c", code],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert (ignoring.returncode, ignoring.stdout, ignoring.stderr) == (143, "went on\nclosed\n", "")


SWALLOWED = {
    "while libraries are imported": ("", "print('not reached', flush=True)", ""),
    "and another comes": (
        "process.all_imported()",
        "os.kill(os.getpid(), signal.SIGTERM); print('not reached')",
        "swallowed\n",
    ),
    "and the work goes on": ("process.all_imported()", "return 0", "swallowed\n"),
}


@pytest.mark.parametrize("name", SWALLOWED)
def test_a_signal_whose_exception_is_swallowed_ends_the_process_all_the_same(name: str, tmp_path: Path) -> None:
    first, then, out = SWALLOWED[name]
    code = (
        "import os, signal; from omni.utils import process\n"
        "process.GRACE = 0.0\n"
        "def main():\n"
        f"    {first}\n"
        "    try: os.kill(os.getpid(), signal.SIGTERM)\n"
        "    except BaseException: print('swallowed', flush=True)\n"
        f"    {then}\n"
        "process.lead(main)\n"
    )
    done = call(["-c", code], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (143, out, "")


HALF = (
    "import os, signal\ntry: os.kill(os.getpid(), {})\nexcept BaseException: pass\nprint('went on', flush=True)\nbool = None\n"
)
"""A library that swallows what a signal's handler raises, and is broken by it."""
IMPORTERS = {
    "plan": ["-m", "train", "plan", "configs/nano.yaml"],  # decides the precision while the configuration is read
    "doctor": ["-m", "train", "doctor", "configs/nano.yaml"],
    "ask": ["-m", "infer", "ask", "--text", "hi", "--model", "model"],
    "late": [
        "-c",
        "from omni.utils import process\ndef main():\n    process.all_imported(); import torch; return 0\nprocess.lead(main)",
    ],
}


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("terminal_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
@pytest.mark.parametrize("name", IMPORTERS)
def test_a_signal_while_a_large_library_is_imported_ends_the_process_at_once(
    name: str, number: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text(HALF.format(int(number)), encoding="utf-8")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    done = call(IMPORTERS[name], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "")


@pytest.mark.usefixtures("terminal_signals")
def test_ctrl_c_raises_as_in_python_when_all_is_imported(tmp_path: Path) -> None:
    code = (
        "import os, signal; from omni.utils import process\n"
        "def main():\n"
        "    process.all_imported()\n"
        "    try: os.kill(os.getpid(), signal.SIGINT)\n"
        "    except KeyboardInterrupt: print('caught', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT); print('not reached', flush=True)\n"
        "process.lead(main)\n"
    )
    done = call(["-c", code], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "caught\n", "")


@pytest.mark.usefixtures("terminal_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_while_the_interpreter_ends_leaves_no_traceback(number: signal.Signals, tmp_path: Path) -> None:
    code = (
        "import atexit, os; from omni.utils import process\n"
        f"def late(): os.kill(os.getpid(), {int(number)}); print('not reached', flush=True)\n"
        "def main():\n"
        "    process.all_imported(); atexit.register(late); return 0\n"
        "process.lead(main)\n"
    )
    done = call(["-c", code], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "")


def test_a_written_answer_wants_standard_output(tmp_path: Path) -> None:
    done = call([*DOORS["infer"], "ask", "--text", "hi", "--task", "T1T2"], tmp_path, ">&-")
    assert done.returncode == 2
    one_line(done.stderr, "--task T1T2 wants standard output, but that was closed")


FAILURES = {
    "unforeseen": (
        "1 / 0",
        "ZeroDivisionError: division by zero (<string>:1); run with --debug for the traceback; please report",
    ),
    "memory": ("raise MemoryError", "memory ran out"),
    "recursion": ("f = lambda: f(); f()", "nested too deeply"),
    "disk": ("raise OSError(28, 'No space left on device')", "cannot be read or written: No space left on device"),
    "several lines": ("raise RuntimeError('a\\n  b')", "RuntimeError: a b (<string>:1); run with"),
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("door", DOORS)
def test_what_nobody_foresaw_is_one_line_and_code_1(
    door: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, part = FAILURES[name]

    def fail(*_: object) -> int:
        exec(code, {})
        return 0

    if door == "infer":
        from infer.__main__ import main

        monkeypatch.setattr("infer.__main__.run", fail)
        assert main(["ask"]) == 1
    else:
        from train.cli import main as train

        monkeypatch.setattr("train.commands.data.main", fail)
        assert train(["data"]) == 1
    out, err = capsys.readouterr()
    one_line(err, part)
    assert out == ""


def test_a_thread_s_end_is_one_line(tmp_path: Path) -> None:
    code = (
        "import threading; from omni.utils.process import lead\n"
        "def main():\n"
        "    thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join(); return 0\n"
        "lead(main)\n"
    )
    done = call(["-c", code], tmp_path)
    assert done.returncode == 0
    one_line(done.stderr, "in the background: ZeroDivisionError")
    assert "Traceback" in call(["-c", code, "--debug"], tmp_path).stderr


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bar", ["", "import tqdm, time; bar = tqdm.tqdm(total=3); bar.update()"])
@pytest.mark.parametrize("own", ["", "logging.basicConfig(format='own: %(message)s')"])
def test_what_the_library_warns_of_is_a_line(bar: str, own: str, tmp_path: Path) -> None:
    code = (
        f"import logging, sys\ndef main():\n    {bar}\n    {own}\n"
        "    logging.getLogger('omni.stores').warning('not %s', 'read')\n"
        "    logging.getLogger('omni.stores').info('fetching'); return 0\n"
        "from omni.utils.process import lead\nlead(main)\n"
    )
    done = call(["-c", code], tmp_path)
    assert not done.returncode
    lines = done.stderr.replace("\r", "\n").splitlines()
    assert done.stderr.count("not read") == 1 and "fetching" not in done.stderr
    assert "own: not read" in done.stderr if own else "not read" in lines


@pytest.mark.parametrize("name", list(process.LINES))
def test_one_line_of_a_library_is_dropped_and_no_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logger, handler, lines = logging.getLogger(name), logging.Handler(), list[str]()
    monkeypatch.setattr(handler, "emit", lambda record: lines.append(record.getMessage()))
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "filters", [])
    process.silence(name)
    process.silence(name)
    logger.warning(f"{process.LINES[name]}: %s", "why")
    logger.warning("something else")
    assert lines == ["something else"] and len(logger.filters) == 1


HUGE = [float("nan"), float("inf"), -float("inf"), 1e300, -1e300, 10**30, -(10**30), "one", 1j]


@pytest.mark.parametrize("value", HUGE, ids=repr)
@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_has_bounds(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^{name} is .{{1,90}}; it must be"):
        check_numbers(**{name: value})


def test_the_line_of_an_error_is_one() -> None:
    assert "\n" not in in_one_line(RuntimeError("one\ntwo\r\nthree"))
    assert (
        in_one_line(PermissionError(13, "Permission denied", "x.wav")) == "'x.wav' cannot be read or written: Permission denied"
    )


RUN = ("fit", "demo", "plan", "doctor")
OF_DATA = ("prepare", "validate", "stats", "listen", "filter")
OF_EDITS = ("apply", "eval", "merge", "revert")
HELPS = [
    "train --help", *(f"train {name} --help" for name in (*RUN, "validate", "convert", "eval", "balance")),
    "train data --help", *(f"train data {name} --help" for name in OF_DATA),
    "train edit --help", *(f"train edit {name} --help" for name in (*OF_EDITS, "fit")),
    "train eval --compare A B --help", "infer --help", "infer ask --help", "infer bench --help",
]  # fmt: skip
"""What is answered."""

REFUSED = {
    "train ftt": "command 'ftt' is unknown; did you mean 'fit'?",
    "train data nonsense": "unknown",
    "train edit nonsense": "unknown",
    **{f"train {name} RUN --optimizer.lrr 1": "unknown option --optimizer.lrr; did you mean --optimizer.lr" for name in RUN},
    **{f"train {name} RUN --optimizer.lr much": "optimizer.lr" for name in RUN},
    **{f"train {name} RUN --ema 2": "ema is 2" for name in RUN},
    **{f"train {name} RUN --model.codec ogg --budget.steps -1": "budget" for name in RUN},
    **{f"train {name} RUN --model.preset nanno": "preset 'nanno' is unknown; did you mean 'nano'?" for name in RUN},
    **{f"train {name} missing.yaml": "does not exist" for name in (*RUN, "balance")},
    **{f"train {name} UNKNOWN_KEY": "did you mean" for name in (*RUN, "balance")},
    **{f"train {name} WRONG_TYPE": "seed" for name in (*RUN, "balance")},
    "train doctor RUN --steps none": "none",
    "train plan RUN --devices 0": "--devices is 0",
    "train validate MODEL --limt 1": "did you mean --limit",
    "train validate missing --config RUN": "model folder missing does not exist",
    "train validate MODEL --config UNKNOWN_KEY": "did you mean",
    "train convert MODEL out --knd hf": "did you mean",
    "train convert MODEL out --dtype int8": "must be 'float32'",
    "train convert missing out": "does not exist",
    "train eval MODEL FACTS --out out --limt 1": "limt",
    "train eval MODEL FACTS --out out --task A9": "A9",
    "train eval missing FACTS --out out": "does not exist",
    "train eval --compare missing": "expected 2",
    "train balance RUN --sed 1": "sed",
    "train data prepare FACTS out --codek x": "codek",
    "train data prepare missing out": "does not exist",
    **{f"train data {name} ROWS --codek x": "codek" for name in ("validate", "stats")},
    **{f"train data {name} missing": "missing" for name in ("validate", "stats")},
    "train data validate ROWS --examples some": "examples",
    "train data listen missing 1": "missing",
    "train data filter ROWS out --rules missing.yaml": "missing.yaml",
    **{f"train edit {name} MODEL FACTS FACTS out --nonsense 1": "nonsense" for name in OF_EDITS},
    "train edit apply missing FACTS out": "does not exist",
    "train edit apply MODEL FACTS out --method guess": "method",
    "train edit eval MODEL missing FACTS out": "does not exist",
    "train edit merge MODEL missing out": "does not exist",
    "train edit revert missing FACTS out": "does not exist",
    "train edit fit missing.yaml": "missing.yaml",
    "train edit fit UNKNOWN_KEY": "unknown",
    "infer nonsense": "unknown",
    "infer ask SOUND --modle x": "did you mean --model",
    "infer ask SOUND --task T1T2": "--task T1T2 asks by text",
    "infer ask SOUND --model MODEL --out missing/a.wav": "there is no folder 'missing'",
    "infer ask SOUND --model MODEL --json --out -": "both want standard output",
    "infer bench --model missing": "does not exist",
}  # fmt: skip
"""What is refused, and a part of the line that says why."""

ONE_AFTER_ANOTHER = """
import contextlib, io, json, sys
from infer.__main__ import main as infer
from train.cli import main as train
done = []
for name, *words in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = {"train": train, "infer": infer}[name](words)
        except SystemExit as end:
            code = end.code or 0
    heavy = [library for library in ("torch", "lightning_fabric", "numpy") if library in sys.modules]
    done.append((code, out.getvalue(), err.getvalue(), heavy))
    if heavy:  # it cannot be imported twice: the lines after this one would tell nothing
        break
json.dump(done, sys.__stdout__)
"""


@pytest.mark.long
def test_help_and_mistakes_are_answered_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    nano = (ROOT / "configs" / "nano.yaml").read_text(encoding="utf-8")
    (tmp_path / "unknown.yaml").write_text(nano + "\nsead: 1\n", encoding="utf-8")
    (tmp_path / "type.yaml").write_text(nano + "\nseed: [1]\n", encoding="utf-8")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "facts.jsonl").write_text('{"audio": "a.wav", "prompt": "hello"}\n', encoding="utf-8")
    for name in ("question.wav", "rows.parquet"):
        (tmp_path / name).write_bytes(b"")
    places = {
        "RUN": str(ROOT / "configs" / "nano.yaml"), "UNKNOWN_KEY": "unknown.yaml", "WRONG_TYPE": "type.yaml", "MODEL": "model",
        "FACTS": "facts.jsonl", "SOUND": "question.wav", "ROWS": "rows.parquet",
    }  # fmt: skip
    lines = [*HELPS, *REFUSED]
    words = [[places.get(word, word) for word in line.split()] for line in lines]
    done = subprocess.run(
        [sys.executable, "-c", ONE_AFTER_ANOTHER], input=json.dumps(words), cwd=tmp_path, capture_output=True, text=True,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for line, (code, out, err, heavy) in zip(lines, json.loads(done.stdout), strict=False):
        assert not heavy, f"{line} imports {heavy}"
        if line in REFUSED:
            assert code == 2, (line, out, err)
            one_line(err, REFUSED[line])
        else:
            assert (code, err) == (0, "") and "usage" in out.lower(), line
