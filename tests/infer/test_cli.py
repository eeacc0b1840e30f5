"""The command line's words become options, quickly."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import typing

import pytest

from infer.cli import parse
from infer.options import AskOptions, BenchOptions
from omni.errors import UserError
from tests.infer.conftest import ROOT

RARE = [f.name for f in dataclasses.fields(AskOptions) if "rare" in f.metadata]
"""Options that only the file of --config sets."""


def test_defaults_are_those_of_the_dataclasses():
    assert parse(["ask"]) == AskOptions()
    assert parse(["bench"]) == BenchOptions()


def test_every_option_can_be_given():
    words = ["ask", "a.wav", "-"]
    wanted = {"files": ("a.wav", "-")}
    given = {bool: ([], True), int: (["7"], 7), float: (["0.5"], 0.5), str: (["x y"], "x y")}

    for name, hint in typing.get_type_hints(AskOptions).items():
        if name == "order" or name in RARE:
            continue
        kind = next((k for k in given if hint in (k, k | None)), None)
        if kind is not None:
            words += [f"--{name}", *given[kind][0]]
            wanted[name] = given[kind][1]
    words += ["--text", "how are you?", "7", "-5", "true"]
    wanted["text"] = ("how are you?", "7", "-5", "true")
    wanted["order"] = "sstttt"
    assert set(wanted) == {f.name for f in dataclasses.fields(AskOptions)} - set(RARE)
    assert parse(words) == AskOptions(**wanted)


def test_a_file_gives_any_option_and_the_command_line_goes_before_it(tmp_path):
    file = tmp_path / "ask.yaml"
    file.write_text("temperature: 0.7\nseed: 3\nmax_silence: 2\ntext: [hello]\n")
    wanted = AskOptions(temperature=0.0, seed=3, max_silence=2.0, text=("hello",))
    assert parse(["ask", "--config", str(file), "--temperature", "0"]) == wanted
    assert parse(["ask", f"--config={file}", "--text", "you"]).text == ("you",)
    for data, says in {"sed: 1": "unknown key sed; did you mean seed", "top_k: -1": "top_k is -1; it must be"}.items():
        file.write_text(data)
        with pytest.raises(UserError, match=f"^{file}: {says}"):
            parse(["ask", "--config", str(file)])
    with pytest.raises(UserError, match="--max_silence is set in the file of --config"):
        parse(["ask", "--max_silence", "2"])


ORDERS = {
    "files around a flag": ("a.wav --chat b.wav", ("a.wav", "b.wav"), (), "ss"),
    "files around a value": ("a.wav --seed 3 b.wav -", ("a.wav", "b.wav", "-"), (), "sss"),
    "a file that is there, at once after a text": ("--text more q.wav --chat", ("q.wav",), ("more",), "ts"),
    "a text of a file's name": ("--text q.wav", (), ("q.wav",), "t"),
    "several texts and files": ("--text 1 two --chat q.wav --text=4 --text 5", ("q.wav",), ("1", "two", "4", "5"), "ttstt"),
    "a name that starts with a dash": ("a.wav --chat -- -b.wav --text", ("a.wav", "-b.wav", "--text"), (), "sss"),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_questions_are_taken_in_their_order_wherever_they_stand(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.wav").touch()
    line, files, texts, order = ORDERS[name]
    options = parse(["ask", *line.split()])
    assert (options.files, options.text, options.order) == (files, texts, order)
    assert options.chat == ("--chat" in line) and options.seed == (3 if "--seed" in line else 0)


def test_help_and_mistakes_do_not_wait_for_torch():
    code = (
        "import sys; from infer.__main__ import main; main(['ask', '--modle', 'x']); main([]);"
        "print([m for m in ('torch', 'numpy', 'soundfile') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_server_needs_no_model_and_takes_one():
    assert parse(["serve"]).model is None
    assert parse(["serve", "models/mine", "--port", "9000", "--adapter", "a=b", "c=d"]).adapter == ("a=b", "c=d")
    for _ in range(2):  # nothing stays of an earlier parse
        options = parse(
            ["serve", "--adapter", "a=b", "--origins", "http://x", "http://y", "--adapter", "c=d", "--origins", "http://z"]
        )
        assert options.adapter == ("a=b", "c=d") and options.origins == ("http://x", "http://y", "http://z")


REFUSED = {
    ("--host", "0.0.0.0"): "--key_file",
    ("--certificate", "x.pem"): "--private_key",
    ("--port", "70000"): "--port",
    ("--key_file", "nowhere"): "--key_file 'nowhere' cannot be read: No such file",
    ("--host", "nohost.invalid"): "--host 'nohost.invalid'",
    ("--adapter", "soft"): "NAME=FOLDER",
    ("--adapter", "a=.", "--adapter", "a=."): "'a' is taken",
    ("--adapter", "default=."): "'default' is taken",
    ("--certificate", "README.md", "--private_key", "README.md"): "--certificate 'README.md'",
    **{
        ("--origins", origin): "--origins"
        for origin in ("example.com", "*", "https://c.example/x", "http://D.example", "https://c.example:443")
    },
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_server_refuses_what_cannot_be(run, folder, words):
    done = run("serve", folder, *words)
    assert done.code == 2 and REFUSED[words] in done.err and "Traceback" not in done.err
