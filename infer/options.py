"""Options of the command line: one dataclass per command, whose fields are its options; and messages in their words.

Nothing heavy is imported here, so that `--help` and a mistyped option are answered at once.
"""

from __future__ import annotations

import os
import re
from dataclasses import field, fields
from typing import Annotated, Any, Literal

from pydantic import Field

from omni.generate.options import (
    AnswerSeconds,
    Channel,
    Penalty,
    Positions,
    Rate,
    Sampling,
    Seed,
    Silence,
    Temperature,
    Tokens,
    TopK,
    TopP,
)
from omni.utils.configuration import Share, configuration

SOUND, TEXT = "s", "t"  # kinds of questions
DEFAULT_MODEL = "runs/nano/model"  # the model folder that `make demo` writes

MODEL = f"model folder; by default {DEFAULT_MODEL}, or the model that ships with omni-speech (nano) where that is not there"

WORDS: tuple[tuple[str, str], ...] = (
    (r"^(device|dtype|quantize|kernels|task) (?='|\S+ is not available)", r"--\1 "),
    (r"\buse 'cpu'", "use --device cpu"),
    (r"\bload the model in (float\w+)", r"use --dtype \1"),
    (r"\bgive raw PCM with its sample rate instead\b", "pipe raw PCM into - with its --input_rate instead"),
    (r"(?<= )(channel|task)='?(\w+)'?(?![\w.])", r"--\1 \2"),
)
"""Patterns of the library's messages, with their replacements on the command line."""


Count = Annotated[int, Field(ge=1, le=10_000)]
Threads = Annotated[int, Field(ge=1, le=4 * (os.cpu_count() or 1))]
"""More than four a core would only wait for each other, and each takes a stack."""


def option(default: Any, help: str, **more: Any) -> Any:
    """A field with its help; `more` goes to `ArgumentParser.add_argument`. A `bool` is a flag, a tuple takes several values."""
    return field(default=default, metadata={"help": help, **more})


def rare(default: Any, help: str) -> Any:
    """A field that is set in the file of `--config` alone."""
    return field(default=default, metadata={"help": help, "rare": True})


@configuration
class DeviceOptions:
    """Options of every command that runs a model."""

    device: str = option("auto", "auto, cpu, cuda, cuda:1, mps")
    threads: Threads | None = option(None, "CPU threads; by default one for a small model and every core for a large one")
    dtype: str | None = option(
        None, "float32, bfloat16, float16, or auto for as stored, which is the default but for fp32 on a GPU: bfloat16 there"
    )
    quantize: str | None = option(None, "int8: linears and tables in int8, on a CPU")
    debug: bool = option(False, "show the traceback of an error")


@configuration
class AnsweringOptions(DeviceOptions):
    """Options of every command that answers."""

    seed: Seed = option(0, "of the random draws")
    temperature: Temperature = option(0.0, "of the sampling; 0 takes the likeliest")
    top_k: TopK = option(0, "draw from the k likeliest ids; 0 is no limit")
    top_p: TopP = option(1.0, "draw from the likeliest ids that make up this probability")
    text_assist: bool = rare(False, "let a second row write the text of spoken answers (mini-omni's batch of two)")
    max_seconds: AnswerSeconds = option(30.0, "longest spoken answer")
    context: Positions | None = rare(
        None, "positions of a conversation, which drops its oldest turns when full; by default the model's, 4096 at most"
    )

    @property
    def sampling(self) -> Sampling:
        """The options that are fields of `Sampling`."""
        names = {field.name for field in fields(Sampling)}
        return Sampling(**{field.name: getattr(self, field.name) for field in fields(self) if field.name in names})


@configuration
class LocalOptions(AnsweringOptions):
    """Options of the commands that answer one person."""

    model: str | None = option(None, MODEL)
    adapter: str | None = option(
        None, "LoRA (PEFT's format) that answers, beside the model's weights: its folder, or its name in the model's adapters/"
    )
    edits: str | None = option(None, "folder of corrections (train edit apply), which act beside the model's weights")
    system: str = option("", "system message before the first question, for a model that was trained with some")
    repetition_penalty: Penalty = rare(1.0, "above 1, what was said becomes less likely")
    max_silence: Silence | None = rare(None, "seconds of silence after which a spoken answer ends; by default none do")


@configuration
class AskOptions(LocalOptions):
    """Ask a model and get its answer while it is made.

    Spoken questions are sound files, or a sound file or raw PCM on standard input (`-`); written ones follow `--text`.
    Several are independent questions, or with `--chat` the turns of one conversation, in which sound and text may be mixed.
    """

    files: tuple[str, ...] = option(
        (), "sound files, or - for one, or raw PCM (s16le, mono), on standard input", positional=True
    )
    text: tuple[str, ...] = option((), "written questions", metavar="TEXT")
    task: str | None = option(None, "A1A2, A1T2, A1T1, T1A2, T1T2 or T1A1; A1A2 for sound and T1A2 for text by default")
    chat: bool = option(False, "the questions are turns of one conversation")
    input_rate: Rate = option(16000, "samples per second of raw PCM on standard input")
    channel: Channel | None = option(None, "which channel of the files to hear, from 0; one or two are mixed by default")
    out: str | None = option(
        None, "WAV, FLAC, OGG or MP3 file for the answer (answer.wav by default), or - for raw PCM (s16le) on standard output"
    )
    speaker: bool = option(False, "play the answer")
    realtime: bool = rare(False, "write the sound no faster than it plays")
    json: bool = option(False, "one JSON object per turn on standard output, and no other text there")
    max_tokens: Tokens = option(512, "longest written answer, in tokens")

    order: str = ""
    """Not an option: the kind of each question in the given order, `s` for sound and `t` for text; "" for sound first."""

    @property
    def kinds(self) -> str:
        """The kind of each question, in the order in which they are asked."""
        return self.order or SOUND * len(self.files) + TEXT * len(self.text)


@configuration
class ChatOptions(LocalOptions):
    """Talk with a model by microphone and loudspeaker.

    It listens all the time, answers when you have stopped speaking, and shows what it says. Enter or Ctrl-C stops an answer;
    Ctrl-C twice, or Ctrl-D, leaves. With --headphones you also interrupt it by speaking. Needs the extra `speaker`.
    """

    server: str | None = option(
        None, "talk with a Realtime server at this address, instead of a model that is loaded here (key: OMNI_API_KEY)"
    )

    headphones: bool = option(
        False, "the microphone does not hear the loudspeaker (headphones, or echo cancellation): speech interrupts an answer"
    )
    turn_detection: str = option(
        "auto",
        "what ends questions: none for Enter, which also begins them, server_vad for silence, semantic_vad for a model with a "
        "turn head, which auto takes where there is one, or JSON of session.update's turn_detection",
    )
    transcribe: bool = option(False, "show what was heard, as the model transcribes it (task A1T1)")
    device_in: str | None = option(
        None, "microphone: its number, or a part of its name; by default the system's; list shows all devices"
    )
    device_out: str | None = option(None, "loudspeaker: its number, or a part of its name; by default the system's")
    save: str | None = option(
        None, "new folder for questions and answers as WAV files, and for the conversation of a model that is loaded here"
    )


@configuration
class ServeOptions(AnsweringOptions):
    """Serve a model to browsers and to clients of OpenAI's Realtime API, many at once.

    The page to talk with is at the address that is printed. Who reaches it from other machines needs a key (--key_file).
    """

    model: str | None = option(None, MODEL, positional=True, nargs="?")
    host: str = option("127.0.0.1", "address to listen on; another one than this machine's own needs --key_file")
    port: Annotated[int, Field(ge=0, le=65_535)] = option(8000, "port to listen on; 0 takes a free one")
    name: str | None = option(None, "name of the model for clients; by default the folder's, or of the one above `model`")
    adapter: tuple[str, ...] = option(
        (), "LoRAs that clients choose as voices, as NAME=FOLDER, besides those in the model's adapters/", metavar="ADAPTER"
    )
    key_file: str | None = option(None, "file with the keys of those who may connect, one a line")
    certificate: str | None = option(None, "PEM file of the certificate, for TLS")
    private_key: str | None = option(None, "PEM file of its key")
    origins: tuple[str, ...] = option((), "origins of pages, besides the server's own, that may connect", metavar="ORIGIN")
    sessions: Count = option(64, "sessions at once; more are told to try again")
    slots: Count | None = option(None, "conversations that have a place in the cache; by default as many as there are")
    session_minutes: Annotated[float, Field(ge=0.01, le=1e6)] = rare(60.0, "longest session")
    key_sessions: Count | None = rare(None, "sessions of one key at once; by default as many as there may be")
    key_audio_minutes: Annotated[float, Field(ge=1, le=1e7)] | None = rare(
        None, "minutes of sound that one key may send in an hour; by default an hour for each of its sessions"
    )
    instructions: Literal["use", "ignore"] = option(
        "ignore", "use: give clients' instructions to the model, where it was trained with some; or ignore"
    )
    max_tokens: Tokens = option(512, "longest written answer, in tokens")


@configuration
class BenchOptions(DeviceOptions):
    """Measure this machine: first audio, real-time factor, steps against the reading of the weights, live sessions.

    Weights are random (their values cost no time) unless `--model` names a folder.
    """

    preset: str | None = option(
        None, "presets to measure, with commas between them; nano and qwen2-0.5b-omni by default (nano with --sessions)"
    )
    model: str | None = option(None, "measure this model folder instead")
    sessions: str | None = option(
        None, "instead play these numbers of live sessions against the clock, such as 1,4,16; the engine has its own process"
    )
    play_seconds: AnswerSeconds = option(60.0, "with --sessions: seconds for which each number is measured")
    nonstop: bool = option(False, "with --sessions: all ask again at once, so that every row speaks all the time")
    barge_in: Share = option(0.1, "with --sessions: share of answers that are interrupted")
    plot: str | None = option(None, "with --sessions: PNG file for lateness, steps and first audio over their numbers")
    question: str | None = option(None, "sound file to ask; noise by default, which costs the same")
    seconds: Annotated[float, Field(ge=1e-3, le=30)] = option(2.0, "length of that noise")
    answer_seconds: AnswerSeconds = option(4.0, "length of the answer that the real-time factor is taken over")
    repeat: Count = option(3, "measurements of each figure, after one to warm up; the median is shown")
    dtype: str | None = option(
        None, "float32, bfloat16 or float16; float32 by default (bfloat16 on a GPU), a folder's as stored"
    )
    kernels: Literal["fast", "reference"] = option(
        "fast", "fast: what is faster on this CPU by its features; or reference: PyTorch alone"
    )
    json: bool = option(False, "one JSON object on standard output instead of tables")


@configuration
class QuantizeOptions:
    """Write a model folder again with its weights in int8, for answering on a CPU.

    Read, rounded and written a piece of a tensor at a time: the model is never in memory as a whole. Then both are loaded, and
    their predictions of a text's next tokens are compared.
    """

    model: str = option("", "model folder in full precision", positional=True)
    out: str = option("", "the folder to write", positional=True)
    text: str | None = option(
        None, "text file on which both are compared; by default descriptions in this package; none to compare nothing"
    )
    overwrite: bool = option(False, "replace a model folder that is there already")
    quiet: bool = option(False, "show nothing while it works")
    debug: bool = option(False, "show the traceback of an error")


@configuration
class GetOptions:
    """Put a model together from SmolLM2-135M-Instruct and Whisper base, which are fetched, and an adapter that ships with
    omni-speech."""

    name: str = option("", "its name: smol", positional=True)
    out: str = option("models/smol", "the folder to write")
    parts: str | None = option(None, "folder with smollm/ and whisper/ (or whisper/base.pt), instead of fetching them")
    overwrite: bool = option(False, "replace a model folder that is there already")
    quiet: bool = option(False, "show nothing while it works")
    debug: bool = option(False, "show the traceback of an error")


Command = GetOptions | AskOptions | ChatOptions | ServeOptions | BenchOptions | QuantizeOptions


def on_one_line(name: str) -> str:
    """Escapes line ends and control characters in a name, so that it fits on one line."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in name)


def in_options(message: str) -> str:
    """Replaces keywords in a message by the names of options."""
    for pattern, words in WORDS:
        message = re.sub(pattern, words, message)
    return message
