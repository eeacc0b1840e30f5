"""Determines the model, the task of each question and the file of its answer, before a model is read."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from infer.options import DEFAULT_MODEL, AskOptions, ChatOptions, ServeOptions
from omni.audio.wav import FORMATS
from omni.errors import UserError
from omni.files import beside, replaceable
from omni.pretrained import NAMES, QUESTION, find_model, find_question, shipped
from omni.tasks import TASKS, Task, find_task
from omni.utils.remote import refuse_remote

PIPE = "-"
"""Standard input among the questions, standard output as a place for the answer."""


Answering = TypeVar("Answering", AskOptions, ChatOptions, ServeOptions)
"""Options of a command that answers with a model."""


def choose_model(options: Answering) -> tuple[Answering, list[str]]:
    """The options with the folder of their model, and what to tell of it: by default it is the one that the demonstration left
    here, else the one that ships with the package."""
    if options.model is not None:
        return replace(options, model=find_model(options.model)), []
    another = "omni-infer serve MODEL" if isinstance(options, ServeOptions) else "--model"
    ships = None if os.path.exists(DEFAULT_MODEL) else shipped(NAMES[0])
    name = DEFAULT_MODEL if ships is None else "the one that ships with omni-speech"
    return replace(options, model=ships or DEFAULT_MODEL), [f"model: {name} ({another} names another)"]


def choose_questions(options: AskOptions) -> tuple[AskOptions, list[str]]:
    """The options with the question that ships with the package, where its name is no file here, and what to tell of it."""
    files = tuple(find_question(file) for file in options.files)
    notes = [] if files == options.files else [f"{QUESTION}: the one that ships with omni-speech"]
    return replace(options, files=files), notes


def choose_tasks(name: str | None, spoken: Sequence[bool]) -> list[Task]:
    """The task of each question: the one called `name`, or the one that answers its kind in text and speech.

    For sound and text together, `name` is the task of one kind, and questions of the other kind get the same kind of answer.

    Raises:
        UserError: an unknown task, or one that does not fit.
    """
    if len(set(spoken)) == 1:
        return [choose_task(name, spoken[0])] * len(spoken)
    both = {True: "A1A2", False: "T1A2"}
    if name is not None:
        given = find_task(name)
        both = {True: f"A1{given.name[2:]}", False: f"T1{given.name[2:]}"}
        if not {*both.values()} <= TASKS.keys():
            raise UserError(f"--task {given.name} is for one kind of question, but sound and --text were given; leave it out")
    return [TASKS[both[one]] for one in spoken]


def choose_task(name: str | None, spoken: bool) -> Task:
    """The task of that name, or the one that answers questions of this kind in text and speech; UserError where it does
    not fit."""
    task = find_task(name or ("A1A2" if spoken else "T1A2"))
    if (task.question == "audio") != spoken:
        given, use = ("sound was given", "--text") if spoken else ("--text was given", "a sound file")
        raise UserError(f"--task {task.name} asks by {task.question}, but {given}; choose another task, or give {use}")
    return task


def places(options: AskOptions, tasks: Sequence[Task]) -> list[Path | None]:
    """The sound file of each answer: `answer.wav`, or `answer-1.wav`, `answer-2.wav`, ... for several; None for no
    file."""
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
    given = Path("answer.wav" if options.out is None else options.out)
    names = [given.with_stem(f"{given.stem}-{n}") if several else given for n in range(1, len(tasks) + 1)]
    return [check_place(str(name), options.files) if heard else None for name, heard in zip(names, spoken, strict=True)]


def check_place(path: str, inputs: Sequence[str]) -> Path:
    """Checks the path of a sound file that is to be written; UserError where it is a remote address, its folder is missing, it
    cannot be written or replaced, its suffix names no format, or it is one of the inputs."""
    refuse_remote(path, "answer", write=True)
    place = Path(path)
    if not os.path.isdir(place.parent):
        raise UserError(f"--out {path!r}: there is no folder {str(place.parent)!r}; make it, or write elsewhere")
    if os.path.isdir(place):
        raise UserError(f"--out {path!r} is a folder; name a file in it, such as {str(place / 'answer.wav')!r}")
    part = beside(replaceable(place), place)
    try:
        part.touch()
        part.unlink()
    except OSError as error:
        raise UserError(f"--out {path!r} cannot be written: {error.strerror}; name a file elsewhere") from error
    if place.suffix.lower() not in FORMATS:
        raise UserError(f"--out {path!r}: the suffix says how sound is written; use {', '.join(FORMATS)}")
    for given in inputs:
        if place.exists() and os.path.exists(given) and os.path.samefile(place, given):
            raise UserError(f"--out {path!r} is also the question; write the answer to another file")
    return place
