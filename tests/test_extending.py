"""The examples of docs/extending.md: its files and commands as they stand there, in a folder outside of the package."""

from __future__ import annotations

import json
import re
import shlex
import wave
from pathlib import Path

import pytest

from tests.processes import Ended, Program

TEXT = (Path(__file__).parent.parent / "docs/extending.md").read_text(encoding="utf-8")
FILES = {name: text for name, text in re.findall(r"^```\w+\n# (\S+)\n(.*?)^```$", TEXT, re.M | re.S)}
COMMANDS = [line for block in re.findall(r"^```sh\n(.*?)^```$", TEXT, re.M | re.S) for line in block.splitlines()]


def run(folder: Path, command: str) -> Ended:
    name, *words = shlex.split(command)
    return Program({"omni-train": "train", "omni-infer": "infer"}[name], *words, folder=str(folder)).end()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder after all commands, and what each has printed in NUMBER.txt."""
    folder = tmp_path_factory.mktemp("mine")
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    with wave.open(str(folder / "beep.wav"), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(b"\x00\x10\x00\xf0" * 4000)
    for number, command in enumerate(COMMANDS):
        ended = run(folder, command)
        assert ended.code == 0, f"{command}: {ended.said[-2000:]}"
        (folder / f"{number}.txt").write_text(ended.out + ended.said)
    return folder


def said(folder: Path, start: str) -> str:
    number = next(n for n, command in enumerate(COMMANDS) if command.startswith(start))
    return (folder / f"{number}.txt").read_text()


def test_every_example_is_short_and_used() -> None:
    modules = [name.removesuffix(".py") for name in FILES if name.endswith(".py")]
    assert len(modules) == 9 and all(text.count("\n") < 40 for text in FILES.values())
    assert all(any(name in text for text in (*COMMANDS, FILES["mine.yaml"])) for name in modules)


@pytest.mark.long
def test_prepare_reads_and_speaks_and_encodes(folder: Path) -> None:
    assert "6 rows of 6 items" in said(folder, "omni-train data prepare")
    assert "6 answers encoded" in said(folder, "omni-train data prepare")


@pytest.mark.long
def test_fit_trains_by_all_of_them(folder: Path) -> None:
    diary = (folder / "run/diary.txt").read_text()
    assert all(part in diary for part in ("step 2: loss", "validation 4", "loss/translate", "saved", "ended after 4 steps"))
    config = json.loads((folder / "run/model/config.json").read_text())["model"]
    assert config["codec"] == "loudness" and config["encoder"]["kind"] == "pooling"
    assert [s["size"] for s in config["layout"]["streams"]] == [64, 64, 64, 64, 256]
    assert (folder / "run/balance.csv").is_file()


@pytest.mark.long
def test_nothing_stored_names_a_plugin(folder: Path) -> None:
    modules = [name.removesuffix(".py").encode() for name in FILES if name.endswith(".py")]
    stored = [path for path in folder.glob("run/**/*") if path.is_file() and path.suffix not in (".png", ".txt")]
    assert len(stored) > 5 and not any(name in path.read_bytes() for path in stored for name in modules)


@pytest.mark.long
def test_ask_answers(folder: Path) -> None:
    assert "of sound at 8000 Hz" in said(folder, "omni-infer ask")
    with wave.open(str(folder / "answer.wav")) as file:
        assert 0 < file.getnframes() <= 0.2 * 8000


@pytest.mark.long
def test_eval_has_the_metric(folder: Path) -> None:
    assert "length" in said(folder, "omni-train eval")
    assert json.loads((folder / "figures/report.json").read_text())["figures"]["length"]["questions"] == 6
