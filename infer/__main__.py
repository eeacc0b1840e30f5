"""`omni-infer` and `python -m infer`: ask a model on the command line, talk with it, serve it, measure how fast a model
answers, or quantise its weights.

Exit codes: 0; 1 where an answer broke (`Ended.error`) and for an error that is not the user's (a full disk, a fault of this
program: one line, no traceback without `--debug`); 2 for a mistake of the user's (one line too); 130 after Ctrl-C; 141 where
the reader of a pipe went away; 129 and 143 after SIGHUP and SIGTERM.
"""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from infer.options import in_options
from omni.errors import UserError, in_one_line
from omni.plugins import take_plugins
from omni.utils.process import BROKEN_PIPE, FAILED, INTERRUPTED, all_imported, forget, lead, open_streams, say

if TYPE_CHECKING:
    from infer.options import QuantizeOptions

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
        _forget_output()
        return BROKEN_PIPE
    except Exception as error:
        return _refuse(error, in_one_line(error), FAILED, words)
    return 0 if whole else FAILED


def run(words: Sequence[str]) -> bool:
    """Parse the words, import the modules of the command, and run it; returns whether no answer broke."""
    from infer.checks import check_ask, check_bench, check_chat, check_quantizing, check_serve, choose_model, choose_questions
    from infer.cli import parse
    from infer.options import AskOptions, ChatOptions, QuantizeOptions, ServeOptions

    options = parse(take_plugins(words))
    if isinstance(options, AskOptions):
        options, notes = choose_model(options)
        options, also = choose_questions(options)
        answers = check_ask(options)
        _tell([*notes, *also])
        from infer.ask import ask

        all_imported()
        return ask(options, answers)
    if isinstance(options, ChatOptions):
        here = options.server is None and options.device_in != "list"
        options, notes = choose_model(options) if here else (options, [])
        check_chat(options)
        _tell(notes)
        from infer.chat.chat import chat

        all_imported()
        return chat(options)
    if isinstance(options, QuantizeOptions):
        check_quantizing(options)
        quantize(options)
        return True
    if isinstance(options, ServeOptions):
        options, notes = choose_model(options)
        check_serve(options)
        _tell(notes)
        from infer.serve.serve import serve

        all_imported()
        serve(options)
        return True
    check_bench(options)
    from infer.bench.bench import bench

    all_imported()
    bench(options)
    return True


def quantize(options: QuantizeOptions) -> None:
    """Write the folder, showing the progress, and print what it holds; UserError as `quantize_folder` raises it."""
    from tqdm import tqdm

    from omni.checkpoint.places import WEIGHTS
    from omni.convert.omni_folder import quantize_folder
    from omni.pretrained import find_model

    all_imported()
    source, target = Path(find_model(options.model)), Path(options.out)
    before, started = (source / WEIGHTS).stat().st_size if (source / WEIGHTS).is_file() else 0, time.monotonic()
    with tqdm(desc="quantising", unit="B", unit_scale=True, leave=False, disable=options.quiet or None) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        files = quantize_folder(source, target, on_progress=show)
    size, seconds = files[WEIGHTS].bytes, time.monotonic() - started
    print(f"{target}: {source} in int8")
    for name, stamp in sorted(files.items()):
        print(f"  {name:<28}{stamp.bytes:>16,} bytes   crc32 {stamp.crc32:08x}")
    print(f"weights of {before / 1e9:.3g} GB became {size / 1e9:.3g} GB ({size / before:.1%}) in {seconds:.1f} s")


def _tell(lines: Sequence[str]) -> None:
    for line in lines:
        say(line)


def _refuse(error: Exception, line: str, code: int, words: Sequence[str]) -> int:
    """Print an error as one line, after the traceback with `--debug`; returns the exit code."""
    if "--debug" in words:
        with contextlib.suppress(OSError, ValueError):
            traceback.print_exception(error)
    say(f"error: {line}")
    return code


def _forget_output() -> None:
    """Points standard output, which nobody reads any more, to the null device, so that Python's last flush does not fail."""
    with contextlib.suppress(OSError, ValueError):
        forget(sys.stdout.fileno())


def script() -> NoReturn:
    """The console script `omni-infer`."""
    lead(main)


if __name__ == "__main__":
    script()
