"""`omni-infer ask`: asks questions, and prints text and plays or writes sound while they are made."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from infer.audio import (
    EncodedOutput,
    Output,
    Outputs,
    Paced,
    Pending,
    PipeOutput,
    SpeakerOutput,
    WavOutput,
    collect,
    collect_warnings,
)
from infer.chat.devices import load_sounddevice
from infer.checks import PIPE
from infer.loading import cpu_threads, load
from infer.options import AskOptions, in_options, on_one_line
from infer.timing import AnswerMeter
from omni.errors import UserError
from omni.generate.results import AudioChunk, Ended, Event, TextDelta, Timings
from omni.generate.session import Session
from omni.tasks import Task
from omni.utils.hardware import find_device

REASONS = {
    "length": "the answer was cut at the limit; see --max_seconds and --max_tokens",
    "silence": "the answer was ended by its silence; see max_silence",
    "cache": "the answer was cut: the conversation fills the model's context; see context",
    "cancelled": "the answer was broken off",
}


def ask(options: AskOptions, answers: Sequence[tuple[Task, Path | None]]) -> bool:
    """Ask every question and deliver the answers; returns whether none of them broke. What needs no model is checked first.

    Args:
        answers: the task of each question and the file of its answer, as `infer.checks` has found them.
    """
    device = find_device(options.device, options.quantize)
    asked = collect(options, sys.stdin.buffer)
    if options.speaker:
        load_sounddevice()
    speaks = any(task.audio for task, _ in answers)
    insists = options.speaker or any(value is not None for value in (options.task, options.out, options.max_silence))
    lm, keywords = load(options, device, speaks, "; for text alone leave --out out, and ask with --task A1T2 or T1T2", insists)
    say, whole = sys.stderr if options.out == PIPE else sys.stdout, True
    with ExitStack() as stack:
        stack.enter_context(cpu_threads(options.threads, lm.model))

        def new_session() -> Session:
            return stack.enter_context(lm.session(max_tokens=options.max_tokens, **keywords))

        session = new_session()
        for number, (question, (task, path)) in enumerate(zip(asked, answers, strict=True)):
            if number and not options.chat:
                session.close()
                session = new_session()
            if len(asked) > 1 and not options.json:
                print(f"[{number + 1}/{len(asked)}] {on_one_line(question.name)}", file=say, flush=True)
            whole &= _turn(session, question, lm.config.answers(task), path, options, say)
    return whole


def _turn(session: Session, question: Pending, task: Task, path: Path | None, options: AskOptions, say: TextIO) -> bool:
    """Ask one question and deliver its text, sound and report, also of an answer that Ctrl-C or a signal interrupts.

    Returns whether the answer did not end with an error.
    """
    rate = session.sample_rate
    outputs = Outputs(_outputs(options, path, rate) if task.audio and rate else [])
    meter, pieces, warned = AnswerMeter(rate), list[str](), list(question.sound_warnings)
    ended = Ended("cancelled", Timings())

    def print_report() -> None:
        file = str(path) if outputs.kept else None
        _print_json(report(task, question, "".join(pieces), file, meter, ended, warned))

    try:
        with outputs:
            with collect_warnings() as read, named(question):
                asked = question.hear(session, task)
            meter.restart()
            with collect_warnings() as heard, named(question):
                events = session.ask(asked, task)
            warned += [*read, *(f"{question.name}: {remark}" for remark in heard)]
            for remark in warned:
                print(f"warning: {on_one_line(remark)}", file=sys.stderr, flush=True)
            ended = follow(events, meter, outputs, None if options.json else say, pieces)
            outputs.broken = ended.error is not None
    except (KeyboardInterrupt, SystemExit):
        if options.json:
            meter.stop()
            print_report()
        raise
    if options.json:
        print_report()
    if ended.error is not None:
        print(f"error: {in_options(ended.error)}", file=sys.stderr, flush=True)
    if options.json or ended.error is not None:
        return ended.error is None
    if outputs.kept:
        print(f"{on_one_line(str(path))}: {meter.sound:.2f} s of sound at {rate} Hz", file=say)
    if ended.reason != "end":
        print(REASONS[ended.reason], file=say)
    print(meter.line(), file=say, flush=True)
    return True


@contextmanager
def named(question: Pending) -> Iterator[None]:
    """Context manager around the asking of a spoken question: an error about its sound names its file."""
    try:
        yield
    except UserError as error:
        if not question.spoken or not str(error).startswith("the question"):
            raise
        raise UserError(f"{on_one_line(question.name)}: {error}") from error


def _print_json(turn: dict[str, Any]) -> None:
    """Print a turn as one line of JSON; characters that the stream's encoding lacks (and bytes of a name that are not UTF-8)
    are escaped."""
    line = json.dumps(turn, ensure_ascii=False)
    try:
        line.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        line = json.dumps(turn)
    print(line, flush=True)


def follow(
    events: Iterable[Event], meter: AnswerMeter, outputs: Outputs | Output, live: TextIO | None, pieces: list[str]
) -> Ended:
    """Pass an answer on as it comes: text to `live` (and, piece by piece, into `pieces`), sound to `outputs`. Returns the
    last event. The meter's clock is paused while text and sound are being written."""
    ended = Ended("cancelled", Timings())
    try:
        for event in events:
            if isinstance(event, TextDelta):
                meter.add_text()
                meter.clock.hold()
                pieces.append(event.text)
                if live is not None:
                    print(event.text, end="", file=live, flush=True)
            elif isinstance(event, AudioChunk):
                meter.add_sound(len(event.samples))
                meter.clock.hold()
                outputs.write(event.samples)
            elif isinstance(event, Ended):
                meter.stop()
                ended = event
            meter.clock.go_on()
    finally:
        if live is not None and pieces:
            print(file=live, flush=True)
    return ended


def report(
    task: Task, question: Pending, text: str, file: str | None, meter: AnswerMeter, ended: Ended, warnings: Sequence[str]
) -> dict[str, Any]:
    """The JSON object of a turn; of a cancelled one, with what was delivered before."""

    def milliseconds(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds * 1e3, 1)

    factor = meter.real_time_factor
    return {
        "task": task.name,
        "question": question.name,
        "text": text,
        "audio": file,
        "seconds": round(meter.sound, 3),
        "first_text_ms": milliseconds(meter.first_text),
        "first_audio_ms": milliseconds(meter.first_audio),
        "real_time_factor": None if factor is None else round(factor, 4),
        "underruns": meter.player.underruns,
        "ended": ended.reason,
        "warnings": list(warnings),
        "error": None if ended.error is None else in_options(ended.error),
    }


def _outputs(options: AskOptions, path: Path | None, rate: int) -> list[Output]:
    """Opens all outputs of the sound; where one cannot be opened, those before it are ended, and nothing stays."""
    outputs: list[Output] = []
    with ExitStack() as undo:

        def paced(output: Output) -> Output:
            return Paced(output, rate) if options.realtime else output

        def add(output: Output) -> None:
            outputs.append(output)
            undo.callback(output.end, "failed")

        if options.speaker:  # first, because it is the one that may fail
            add(Paced(SpeakerOutput(rate)))
        if path is not None:
            wav = path.suffix.lower() == ".wav"
            add(paced(WavOutput(path, rate) if wav else EncodedOutput(path, rate)))
        if options.out == PIPE:
            add(paced(PipeOutput(sys.stdout.buffer)))
        undo.pop_all()
    return outputs
