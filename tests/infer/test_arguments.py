"""The command line's words become options, quickly."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from infer.__main__ import main
from infer.arguments import COMMANDS, build_parser, parse
from infer.options import AskOptions, BenchOptions
from tests.infer.conftest import ROOT


def test_defaults_are_those_of_the_dataclasses():
    assert parse(["ask"]) == AskOptions()
    assert parse(["bench"]) == BenchOptions()


def test_every_option_can_be_given():
    words = ["ask", "a.wav", "-"]
    wanted = {"files": ("a.wav", "-")}
    given = {bool: ([], True), int: (["7"], 7), float: (["0.5"], 0.5), str: (["x y"], "x y")}
    import typing

    for name, hint in typing.get_type_hints(AskOptions).items():
        kind = next((k for k in given if hint in (k, k | None)), None)
        if kind is not None:
            words += [f"--{name}", *given[kind][0]]
            wanted[name] = given[kind][1]
    words += ["--text", "how are you?", "7", "-5", "true"]
    wanted["text"] = ("how are you?", "7", "-5", "true")
    assert set(wanted) == {f.name for f in dataclasses.fields(AskOptions)}
    assert parse(words) == AskOptions(**wanted)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_option(command, capsys):
    with pytest.raises(SystemExit) as done:
        main([command, "--help"])
    text = capsys.readouterr().out
    assert done.value.code == 0
    for f in dataclasses.fields(COMMANDS[command]):
        assert f.name in text and f.metadata["help"].split()[0] in text


def test_help_and_mistakes_do_not_wait_for_torch():
    code = (
        "import sys; from infer.__main__ import main; main(['ask', '--modle', 'x']); main([]);"
        "print([m for m in ('torch', 'numpy', 'soundfile') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_the_parser_lists_the_commands():
    assert all(name in build_parser().format_help() for name in COMMANDS)
