"""The command line: `omni-train COMMAND ...`. Commands are imported when they are called."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from omni.errors import LostError, UserError, in_one_line
from omni.plugins import take_plugins
from omni.utils.process import BROKEN_PIPE, FAILED, INTERRUPTED, all_imported, forget, say
from train.console.command import check_command

GRACE = 5.0
"""Seconds that a process which is not the first one waits with a mistake of its own."""

COMMANDS = {
    "fit": ("train.commands.fit", "train a model: fit configs/NAME.yaml [--any.key value ...]"),
    "demo": ("train.commands.fit:run_demo", "train the small model of configs/nano.yaml, examine it and talk to it"),
    "validate": (
        "train.commands.models:run_validate",
        "ask a finished model its run's validation questions: validate MODEL [--limit 200]",
    ),
    "plan": ("train.commands.fit:run_plan", "what a run needs and how long it takes: plan CONFIG [--devices 8 --gpu_gib 24]"),
    "doctor": (
        "train.commands.fit:run_doctor",
        "a few steps under the graph guard: doctor CONFIG [--steps 2] [--any.key value ...]",
    ),
    "convert": ("train.commands.models:run_convert", "bring weights in or out: convert SOURCE TARGET [--kind ...]"),
    "push": ("train.commands.models:run_push", "upload a model to the Hugging Face Hub, with a card: push RUN hf://owner/name"),
    "data": ("train.commands.data", "prepare, validate, stats, listen or filter data: data prepare SOURCE OUT"),
    "eval": ("train.commands.eval", "figures on a set of questions: eval MODEL DATA --out OUT; eval --compare OUT OUT"),
    "edit": ("train.commands.edit", "correct single answers: edit apply MODEL FACTS OUT; also eval, merge, revert, fit"),
    "balance": ("train.commands.balance", "compare methods of balance over seeds: balance configs/nano-balance.yaml"),
}
"""Name of a command to its module, whose `main(argv)`, or a function named after the colon, returns the exit code, and what it
does."""

HELP = """usage: omni-train COMMAND [options]

{commands}

  --debug     with any command: show where an error came from
  --plugin    with any command: a module of one's own, such as my_package.my_module (docs/extending.md)

`omni-train COMMAND --help` explains a command. Training itself: docs/training.md."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code.

    A user's mistake, and a file that the system cannot read or write, is one line and 2; any other error one line and 1
    (`--debug`: both are raised). An interrupt is 130; 141 where the reader of the output has closed it.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"]
    if not debug:  # else PyTorch logs every connection that another process closes, with addresses in its code
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        if not arguments or arguments[0] in ("-h", "--help"):
            print(HELP.format(commands="\n".join(f"  {name:<11} {text}" for name, (_, text) in COMMANDS.items())), flush=True)
            return 0 if arguments else 2
        arguments = take_plugins(arguments)
        check_command(arguments[0] if arguments else "", COMMANDS)
        module, _, function = COMMANDS[arguments[0]][0].partition(":")
        run = getattr(importlib.import_module(module), function or "main")
        all_imported()
        code: int = run(arguments[1:])
        sys.stdout.flush()
        return code
    except UserError as error:
        if debug:
            raise
        if isinstance(error, LostError):
            say(f"error: {error}")
            return error.code
        if not _rank() or error.alone:  # all processes of a run fail alike; the first one reports
            say(f"error: {error}")
        elif not error.shared:
            time.sleep(GRACE)  # where the first process has the mistake as well, the launcher ends this one before
            say(f"error: process {_rank()} (host {socket.gethostname()}): {error}")
            return error.code
        if not error.again:
            _end_launcher()
        return 0 if _rank() and not error.alone else error.code
    except BrokenPipeError:  # whoever read what is printed, such as `head`, has read enough
        forget(sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        if arguments[:1] == ["eval"] or arguments[:2] in (["data", "prepare"], ["data", "answers"]):
            say("interrupted; the same command goes on with what is finished")
        return INTERRUPTED
    except Exception as error:
        if debug:
            raise
        if isinstance(error, OSError) and error.filename is not None:
            say(f"error: {error.filename} cannot be read or written ({error.strerror}); fix that and run again")
            return 2
        lost = any(base.__name__ == "DistError" for base in type(error).__mro__)  # another process has ended, and said why
        if not (_rank() > 0 and lost):
            say(f"error: {in_one_line(error)}")
        return FAILED


def _rank() -> int:
    """Number of this process of a run; 0 for the first, and for any other."""
    return next((rank for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK") if (rank := int(os.environ.get(name) or 0)) > 0), 0)


def _end_launcher() -> None:
    """Ends the torchrun that would start the run again, as often as `--max-restarts` says, only to meet the same mistake."""
    names = ("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT")
    most, done = (int(os.environ.get(name) or 0) for name in names)
    if done >= most or os.environ.get("LOCAL_RANK") != "0":
        return
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
        if b"torchrun" in command or b"torch.distributed.run" in command:
            os.kill(os.getppid(), signal.SIGTERM)
