"""Both command lines in real processes: closed and full streams, encodings, odd names, what nobody foresaw."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from omni.errors import UserError, in_one_line
from omni.generate.bounds import BOUNDS, check_number

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


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.skipif(not os.path.exists(FULL), reason="no /dev/full here")
def test_a_full_standard_output_is_one_line_and_code_1(door: str, tmp_path: Path) -> None:
    done = call([*DOORS[door], *HELP[door]], tmp_path, f">{FULL}")
    assert done.returncode == 1
    one_line(done.stderr, "No space left on device")


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


@pytest.mark.parametrize("env", [{"PYTHONIOENCODING": "ascii"}, {"LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
@pytest.mark.parametrize("door", DOORS)
def test_names_that_are_not_text_are_printed_in_every_encoding(door: str, env: dict[str, str], tmp_path: Path) -> None:
    name = os.fsdecode(b"fr\xe9mi-\xc3\xa9.wav")
    words = ["ask", name] if door == "infer" else [name]
    done = call([*DOORS[door], *words], tmp_path, env=env)
    assert done.returncode == 2
    one_line(done.stderr, "mi-")


def test_signals_that_are_ignored_stay_so_and_others_end_in_order(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from omni.process import lead\n"
        "def main():\n"
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


FAILURES = {
    "unforeseen": ("1 / 0", "ZeroDivisionError: division by zero; run with --debug for the traceback; please report"),
    "memory": ("raise MemoryError", "memory ran out"),
    "recursion": ("f = lambda: f(); f()", "nested too deeply"),
    "disk": ("raise OSError(28, 'No space left on device')", "cannot be read or written: No space left on device"),
    "several lines": ("raise RuntimeError('a\\n  b')", "RuntimeError: a b; run with"),
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

        monkeypatch.setattr("train.data_command.main", fail)
        assert train(["data"]) == 1
    out, err = capsys.readouterr()
    one_line(err, part)
    assert out == ""


def test_a_thread_s_end_is_one_line(tmp_path: Path) -> None:
    code = (
        "import threading; from omni.process import lead\n"
        "def main():\n"
        "    thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join(); return 0\n"
        "lead(main)\n"
    )
    done = call(["-c", code], tmp_path)
    assert done.returncode == 0
    one_line(done.stderr, "in the background: ZeroDivisionError")
    assert "Traceback" in call(["-c", code, "--debug"], tmp_path).stderr


HUGE = [float("nan"), float("inf"), -float("inf"), 1e300, -1e300, 10**30, -(10**30), 10**5000, "1", None, True, 1j]


@pytest.mark.parametrize("value", HUGE, ids=lambda v: repr(v) if not isinstance(v, int) or abs(v) < 10**40 else "10**5000")
@pytest.mark.parametrize("name", BOUNDS)
def test_every_number_has_bounds(name: str, value: object) -> None:
    with pytest.raises(UserError, match=rf"^--{name} is .{{1,90}}; (it must be|give)"):
        check_number(name, value, as_what=f"--{name}")


def test_the_line_of_an_error_is_one() -> None:
    assert "\n" not in in_one_line(RuntimeError("one\ntwo\r\nthree"))
    assert (
        in_one_line(PermissionError(13, "Permission denied", "x.wav")) == "'x.wav' cannot be read or written: Permission denied"
    )
