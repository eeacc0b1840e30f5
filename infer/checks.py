"""Checks the options of every command before anything heavy is imported, and finds model, tasks and files of answers."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import re
import socket
import ssl
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from infer.chat.devices import load_sounddevice
from infer.options import (
    DEFAULT_MODEL,
    SOUND,
    AskOptions,
    BenchOptions,
    ChatOptions,
    Command,
    DeviceOptions,
    GetOptions,
    LocalOptions,
    QuantizeOptions,
    ServeOptions,
)
from omni.audio.wav import FORMATS
from omni.checkpoint.places import CONFIG, adapters_in, check_folder
from omni.errors import UserError, closest
from omni.files import beside, check_replaceable, replaceable
from omni.pretrained import ADAPTED, NAMES, QUESTION, find_model, find_question, shipped
from omni.stores.reading import local_path
from omni.tasks import TASKS, Task, find_task
from omni.utils.hardware import check_device, check_dtype, check_quantize
from omni.utils.remote import refuse_remote

PIPE = "-"  # standard input among the questions, standard output as a place for the answer
PLAYING = ("play_seconds", "nonstop", "barge_in", "plot")  # options that only count with `--sessions`
MOST_SESSIONS = 1024  # of a bench
SPEAKER_EXTRA = ("av", "fastapi", "itsdangerous", "onnxruntime", "prometheus_client", "silero_vad", "websockets")
"""Modules that the extra `speaker` brings besides `sounddevice`."""

SERVE_EXTRA = (
    *("fastapi", "uvicorn", "uvloop", "websockets", "python_multipart", "aiortc", "av"),
    *("onnxruntime", "silero_vad", "prometheus_client", "itsdangerous"),
)
"""Modules that the extra `serve` brings."""


def check_ask(options: AskOptions) -> list[tuple[Task, Path | None]]:
    """Checks the options of `ask`; returns each question's task and its answer's file. UserError for the first bad option."""
    check_options(options)
    check_questions(options.files, options.text, options.chat)
    tasks = choose_tasks(options.task, [kind == SOUND for kind in options.kinds])
    paths = answer_files(options, tasks)
    check_model(DEFAULT_MODEL if options.model is None else options.model)
    return list(zip(tasks, paths, strict=True))


def check_bench(options: BenchOptions) -> None:
    """Checks the options of `bench`. UserError for the first bad option."""
    check_options(options)
    if options.question is not None:
        check_file(options.question)
    if options.model is not None:
        check_model(options.model)
    check_playing(options)


def check_serve(options: ServeOptions) -> None:
    """Checks the options of `serve`. UserError for the first bad option."""
    check_extra("serve", "serve", SERVE_EXTRA)
    check_options(options)
    if (options.certificate is None) != (options.private_key is None):
        raise UserError("--certificate and --private_key belong together; give both, or neither")
    if options.certificate is not None and options.private_key is not None:
        _check_certificate(options.certificate, options.private_key)
    for origin in options.origins:
        _check_origin(origin)
    read_adapters(options.adapter, options.model or DEFAULT_MODEL)
    if not _is_loopback(options.host) and options.key_file is None:
        raise UserError(
            f"--host {options.host}: whoever reaches it could use it; give keys (--key_file FILE), or listen on 127.0.0.1"
        )
    check_model(options.model or DEFAULT_MODEL, "name one: omni-infer serve FOLDER")


def read_adapters(values: Sequence[str], model: str) -> dict[str, str]:
    """Folders of adapters by name: those in the model's folder, and those of `NAME=FOLDER` or `FOLDER`, which replace them.
    UserError for a name that is empty, comes twice or is taken, or a folder that does not exist."""
    adapters: dict[str, str] = {}
    for value in values:
        name, sign, folder = value.partition("=")
        if not sign:
            name, folder = Path(value).resolve().name, value
        if not name or not folder:
            raise UserError(f"--adapter {value!r} lacks its {'folder' if name else 'name'}; give NAME=FOLDER")
        if not os.path.isdir(folder):
            raise UserError(f"--adapter {value!r}: there is no folder {folder!r}; give NAME=FOLDER")
        if name in adapters or name == "default":
            raise UserError(f"--adapter {value!r}: the name {name!r} is taken; give another one, as NAME=FOLDER")
        adapters[name] = folder
    return {name: str(path) for name, path in adapters_in(local_path(model)).items() if name != "default"} | adapters


def _check_certificate(certificate: str, private_key: str) -> None:
    def refuse() -> str:
        raise UserError(f"--private_key {private_key!r} is encrypted; give a key without a pass phrase")

    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, private_key, password=refuse)
    except OSError as error:  # ssl's errors are some
        raise UserError(
            f"--certificate {certificate!r} and --private_key {private_key!r} cannot be used: "
            f"{getattr(error, 'reason', None) or error.strerror or error}; give PEM files of a certificate and of its own key"
        ) from error


def _check_origin(origin: str) -> None:
    """UserError for one that no browser sends."""
    usual = re.fullmatch(r"http://.*:80|https://.*:443", origin)
    if usual or not re.fullmatch(r"https?://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[1-9]\d{0,4})?", origin):
        raise UserError(
            f"--origins {origin!r} is no origin that a browser sends; give http:// or https:// and the host, in small letters, "
            "with the port where it is not the usual one, and nothing after it"
        )


def _is_loopback(host: str) -> bool:
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host {host!r} is no address here: {getattr(error, 'strerror', None) or error}") from error
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)


def check_playing(options: BenchOptions) -> None:
    """Checks the options of live sessions. UserError for the first bad one."""
    if options.sessions is None:
        usual = BenchOptions()
        for name in PLAYING:
            if getattr(options, name) != getattr(usual, name):
                raise UserError(f"--{name} is for live sessions; give their numbers too, such as --sessions 1,4,16")
        return
    for word in options.sessions.split(","):
        if not re.fullmatch(r" *\d{1,9} *", word, re.ASCII) or not 1 <= int(word) <= MOST_SESSIONS:
            raise UserError(
                f"--sessions {options.sessions!r}: {word.strip()!r} is no number of sessions; give numbers from 1 to "
                f"{MOST_SESSIONS} with commas between them, such as 1,4,16"
            )
    if options.plot is not None:
        if Path(options.plot).suffix.lower() != ".png":
            raise UserError(f"--plot {options.plot!r} is no name of a PNG file; end it in .png")
        check_place("--plot", options.plot, "picture")
        if options.model is None and "," in (options.preset or ""):
            raise UserError(f"--plot draws one model, and --preset names {options.preset}; name one of them")


def check_place(option: str, file: str, noun: str) -> None:
    """UserError where an option's file cannot be written or replaced: at a remote address, in a folder that is missing, or in
    one that takes no file."""
    refuse_remote(file, noun, write=True)
    target = Path(file)
    if not os.path.isdir(target.parent):
        raise UserError(f"{option} {file!r}: there is no folder {str(target.parent)!r}; make it first")
    part = beside(replaceable(target), target)
    try:
        part.touch()
        part.unlink()
    except OSError as error:
        raise UserError(f"{option} {file!r} cannot be written: {error.strerror}; name another place") from error


def check_quantizing(options: QuantizeOptions) -> None:
    """Checks the options of `quantize`. UserError for the first bad option, or a place that would lose something."""
    for name in ("model", "out"):
        if not getattr(options, name):
            raise UserError(f"{name.upper()} is empty; give the folder {'to write' if name == 'out' else 'of a model'}")
    check_model(options.model)
    check_replaceable(Path(options.out), (CONFIG,), (Path(find_model(options.model)),), overwrite=options.overwrite)
    if options.text not in (None, "none"):
        try:
            text = Path(options.text).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--text {options.text!r} cannot be read: {error}; name a text file in UTF-8, or none") from error
        if len(text) < 1000:
            raise UserError(f"--text {options.text!r} has {len(text)} characters; name a text of 1,000 or more, or none")


def check_getting(options: GetOptions) -> None:
    """Checks the options of `get`. UserError: no model has that name, or a folder would be lost."""
    if options.name not in ADAPTED:
        raise UserError(f"get {options.name!r}: there is no such model; {closest(options.name, ADAPTED)}")
    sources = () if options.parts is None else (Path(options.parts),)
    check_replaceable(Path(options.out), (CONFIG,), sources, overwrite=options.overwrite)


def check_options(options: DeviceOptions) -> None:
    """Checks where and in which form a command's model runs. UserError for the first bad option."""
    check_device(options.device)
    check_dtype(options.dtype)
    check_quantize(options.quantize, options.device)


def check_extra(command: str, extra: str, modules: Sequence[str]) -> None:
    """UserError where modules that an extra of the package brings are not installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f'{command} needs {", ".join(missing)}; install them: pip install "omni-speech[{extra}]"')


def check_questions(files: Sequence[str], texts: Sequence[str], chat: bool) -> None:
    """UserError for no questions, those of both kinds where they are no chat, an empty text, `-` twice, or a missing file."""
    if files and texts and not chat:
        raise UserError("sound files and --text were given together; add --chat to make them turns of one conversation")
    if not files and not texts:
        raise UserError("there is no question; give a sound file, - for sound on standard input, or --text '...'")
    if list(files).count(PIPE) > 1:
        raise UserError("- was given twice, but standard input can be read only once")
    for text in texts:
        if not text.strip():
            raise UserError("--text is empty; write a question")
    for file in files:
        if file != PIPE:
            check_file(file)


def check_file(file: str) -> None:
    """UserError for a missing sound file."""
    refuse_remote(file, "sound file")
    try:
        os.stat(file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"{file!r}: {reason}: check the path of the sound file; written questions follow --text") from error


def check_model(folder: str, another: str = "give --model FOLDER") -> None:
    """UserError where there is no model of that name; `another` says how a different one is named."""
    if folder == DEFAULT_MODEL and not Path(folder).exists():
        raise UserError(f"there is no model in {folder} yet; `omni-train demo` trains one, or {another}")
    check_folder(Path(find_model(folder)))


def choose_shipped(options: Command) -> tuple[Command, list[str]]:
    """The options with the folder of their model, and the question that ships where no file here has its name; and what to tell
    of both: by default the model is the one that the demonstration left here, else the one that ships with the package."""
    if isinstance(options, (BenchOptions, GetOptions, QuantizeOptions)):
        return options, []
    if isinstance(options, ChatOptions) and (options.server is not None or options.device_in == "list"):
        return options, []
    model, notes = find_model(options.model or ""), list[str]()
    if options.model is None:
        another = "omni-infer serve MODEL" if isinstance(options, ServeOptions) else "--model"
        ships = None if os.path.exists(DEFAULT_MODEL) else shipped(NAMES[0])
        model, name = ships or DEFAULT_MODEL, DEFAULT_MODEL if ships is None else "the one that ships with omni-speech"
        notes.append(f"model: {name} ({another} names another)")
    if isinstance(options, AskOptions):
        files = tuple(find_question(file) for file in options.files)
        notes += [f"{QUESTION}: the one that ships with omni-speech"] if files != options.files else []
        options = replace(options, files=files)
    return replace(options, model=model), notes


def choose_tasks(name: str | None, spoken: Sequence[bool]) -> list[Task]:
    """The task of each question: the one called `name`, or the one that answers its kind in text and speech.

    For sound and text together, `name` is the task of one kind, and questions of the other kind get the same kind of answer.
    UserError for an unknown task, or one that does not fit."""
    both, task = {True: "A1A2", False: "T1A2"}, None if name is None else find_task(name)
    if task is not None and len(set(spoken)) > 1:
        both = {True: f"A1{task.name[2:]}", False: f"T1{task.name[2:]}"}
        if not {*both.values()} <= TASKS.keys():
            raise UserError(f"--task {task.name} is for one kind of question, but sound and --text were given; leave it out")
    elif task is not None and (task.question == "audio") != spoken[0]:
        problem, use = ("sound was given", "--text") if spoken[0] else ("--text was given", "a sound file")
        raise UserError(f"--task {task.name} asks by {task.question}, but {problem}; choose another task, or give {use}")
    elif task is not None:
        return [task] * len(spoken)
    return [TASKS[both[is_spoken]] for is_spoken in spoken]


def answer_files(options: AskOptions, tasks: Sequence[Task]) -> list[Path | None]:
    """The sound file of each answer: `answer.wav`, or `answer-1.wav`, `answer-2.wav`, ... for several; None for no file."""
    written = next((f"--task {task.name}" for task in tasks if not task.audio), "")
    wants = "--json" if options.json else "--out -" if options.out == PIPE else written
    if wants and sys.__stdout__ is None:
        raise UserError(f"{wants} wants standard output, but that was closed; leave it open")
    spoken, several = [task.audio for task in tasks], len(tasks) > 1
    if options.json and options.out == PIPE:
        raise UserError("--json and --out - both want standard output; write the sound to a file, or leave --json out")
    if options.out == PIPE and not any(spoken):
        raise UserError(f"--out - wants sound, but --task {tasks[0].name} answers in text only; leave --out out")
    if options.out == PIPE or (options.out is None and options.speaker):
        return [None] * len(tasks)
    path = Path("answer.wav" if options.out is None else options.out)
    names = [path.with_stem(f"{path.stem}-{n}") if several else path for n in range(1, len(tasks) + 1)]
    return [check_answer_file(str(name), options.files) if heard else None for name, heard in zip(names, spoken, strict=True)]


def check_answer_file(path: str, inputs: Sequence[str]) -> Path:
    """Checks the path of a sound file that is to be written; UserError where it is a remote address, its folder is missing, it
    cannot be written or replaced, its suffix names no format, or it is one of the inputs."""
    target = Path(path)
    if os.path.isdir(target):
        raise UserError(f"--out {path!r} is a folder; name a file in it, such as {str(target / 'answer.wav')!r}")
    check_place("--out", path, "answer")
    if target.suffix.lower() not in FORMATS:
        raise UserError(f"--out {path!r}: the suffix says how sound is written; use {', '.join(FORMATS)}")
    for question in inputs:
        if target.exists() and os.path.exists(question) and os.path.samefile(target, question):
            raise UserError(f"--out {path!r} is also the question; write the answer to another file")
    return target


REMOTE = ("server", "system", "adapter", "temperature", "debug")
"""Options of a chat's model that a server takes, besides the chat's own."""


def check_chat(options: ChatOptions) -> None:
    """Checks the options of `chat`. UserError for the first bad option."""
    load_sounddevice("chat", " (libportaudio2 on Debian and Ubuntu)")
    check_extra("chat", "speaker", SPEAKER_EXTRA)
    if options.device_in == "list":
        return
    check_options(options)
    if options.turn_detection == "none" and options.headphones:
        raise UserError("--turn_detection none: a key begins questions then; leave --headphones out")
    if options.save is not None:
        check_new_folder(options.save)
    if options.server is None:
        check_model(DEFAULT_MODEL if options.model is None else options.model)
        return
    own = {field.name for field in fields(LocalOptions)} - set(REMOTE)
    if unused := [f"--{name}" for name in sorted(own) if getattr(options, name) != getattr(ChatOptions(), name)]:
        raise UserError(f"--server answers with a model of its own; leave out {', '.join(unused)}")


def check_new_folder(folder: str) -> None:
    """UserError for a folder that cannot be made, or has something in it."""
    path = Path(folder)
    if not folder or (path.exists() and not path.is_dir()):
        raise UserError(f"--save {folder!r} is no folder; name a new one")
    if path.is_dir() and any(path.iterdir()):
        raise UserError(f"--save {folder!r} has files in it; name a new folder")
    check_place("--save", str(path / "answer-1.wav") if path.is_dir() else folder, "folder")
