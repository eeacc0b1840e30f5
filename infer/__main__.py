"""`python -m infer`: ask a model on the command line, or measure how fast it answers.

Exit codes: 0; 1 where an answer broke (`Ended.error`); 2 for a mistake of the user's (one line, no traceback without
`--debug`); 130 after Ctrl-C; 141 where the reader of a pipe went away.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType

from omni.errors import UserError

BROKE, USER_MISTAKE, INTERRUPTED, BROKEN_PIPE, TERMINATED = 1, 2, 130, 141, 143


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (by default this process's) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        whole = run(words)
        sys.stdout.flush()
    except UserError as error:
        if "--debug" in words:
            traceback.print_exc()
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return USER_MISTAKE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _forget_output()
        return BROKEN_PIPE
    return 0 if whole else BROKE


def run(words: Sequence[str]) -> bool:
    """Parse, then import what the command needs, then do it; whether no answer broke."""
    from infer.arguments import parse
    from infer.options import AskOptions

    options = parse(words)
    if isinstance(options, AskOptions):
        from infer.ask import ask

        return ask(options)
    from infer.bench import bench

    bench(options)
    return True


def _forget_output() -> None:
    """Nobody reads standard output any more: let Python's last flush go nowhere instead of complaining."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _terminate(number: int, frame: FrameType | None) -> None:
    """Leave by an exception, so that what was written so far is closed properly."""
    raise SystemExit(TERMINATED)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(main())
