"""`omni-infer` and `python -m infer`: ask a model on the command line, talk with it, serve it, measure how fast a model
answers, quantise its weights, or put one together.

Exit codes: 0; 1 where an answer broke (`Ended.error`) and for an error that is not the user's (a full disk, a fault of this
program: one line, no traceback without `--debug`); 2 for a mistake of the user's (one line too); 130 after Ctrl-C; 141 where
the reader of a pipe went away; 129 and 143 after SIGHUP and SIGTERM.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn

from infer.options import in_options
from omni.errors import UserError, in_one_line
from omni.plugins import take_plugins
from omni.utils.process import BROKEN_PIPE, FAILED, INTERRUPTED, all_imported, forget, lead, open_streams, say

USER_MISTAKE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (by default this process's) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    open_streams()
    try:
        try:
            whole = run(words)
        except SystemExit:  # after `--help`
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except UserError as error:
        return _refuse(error, in_options(" ".join(str(error).split())), USER_MISTAKE, words)
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # else Python's last flush fails
            forget(sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        return _refuse(error, in_one_line(error), FAILED, words)
    return 0 if whole else FAILED


def run(words: Sequence[str]) -> bool:
    """Parse the words, import the modules of the command, and run it; returns whether no answer broke."""
    from infer import checks
    from infer import options as kinds
    from infer.cli import parse

    doors: dict[type, tuple[Callable[..., Any], str]] = {
        kinds.AskOptions: (checks.check_ask, "infer.ask"),
        kinds.ChatOptions: (checks.check_chat, "infer.chat.chat"),
        kinds.QuantizeOptions: (checks.check_quantizing, "infer.quantize"),
        kinds.GetOptions: (checks.check_getting, "infer.get"),
        kinds.ServeOptions: (checks.check_serve, "infer.serve.serve"),
        kinds.BenchOptions: (checks.check_bench, "infer.bench.bench"),
    }
    options, notes = checks.choose_shipped(parse(take_plugins(words)))
    check, module = doors[type(options)]
    answers = check(options)
    command = getattr(import_module(module), module.rpartition(".")[2])
    for line in notes:
        say(line)
    all_imported()
    done = command(options) if answers is None else command(options, answers)
    return done is not False


def _refuse(error: Exception, line: str, code: int, words: Sequence[str]) -> int:
    """Print an error as one line, after the traceback with `--debug`; returns the exit code."""
    if "--debug" in words:
        with contextlib.suppress(OSError, ValueError):
            traceback.print_exception(error)
    say(f"error: {line}")
    return code


def script() -> NoReturn:
    """The console script `omni-infer`."""
    lead(main)


if __name__ == "__main__":
    script()
