"""What a reader's message tells to say is an option of the commands that read data, in the syntax that they take."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from omni.errors import UserError
from tests.train.data.readers.toys import (
    llama_omni,
    only_broken,
    snac_frames,
    snac_text,
    voice_assistant,
    write_lines,
    write_parquet,
    write_tone,
)
from tests.train.eval.toys import QUICK, read_lines, save_model
from train.commands import data_prepare
from train.commands import eval as eval_command
from train.commands.data_prepare import main
from train.commands.eval import main as evaluate
from train.data.readers import Broken, ReaderOptions, open_source

pytestmark = pytest.mark.usefixtures("quick_disk")


def prepared(source: Path, out: Path, *flags: str) -> int:
    """Rows made, by the command; UserError as it has it."""
    assert main([str(source), str(out), "--workers", "0", "--progress", "off", *flags]) == 0
    return int(json.loads((out / "report.json").read_text())["rows"])


def packed(index: int) -> dict:
    """A row whose codes are ids of mini-omni's streams."""
    frames = [[code + 4160 * place for place, code in enumerate(frame)] for frame in snac_frames(index, 6)]
    return voice_assistant(index) | {"answer_snac": snac_text(frames)}


def table(tmp_path: Path) -> tuple[Path, str]:
    write_tone(tmp_path / "q.wav")
    (tmp_path / "a.csv").write_text("audio,transcript\nq.wav,Hi\n")
    with pytest.raises(UserError) as error:
        prepared(tmp_path / "a.csv", tmp_path / "none", "--read.format", "table")
    return tmp_path / "a.csv", str(error.value)


def units(tmp_path: Path) -> tuple[Path, str]:
    path = llama_omni(tmp_path)
    first = next(iter(open_source(path)))
    assert isinstance(first, Broken) and "say which with --read.codec, one of codec2, " in first.why
    return path, first.why.replace("--read.codec,", "--read.codec cosyvoice2")


def packing(tmp_path: Path) -> tuple[Path, str]:
    path = write_parquet(tmp_path / "rows" / "a.parquet", [packed(0), packed(1)])
    write_parquet(tmp_path / "mixed.parquet", [packed(0), voice_assistant(1)])
    return path, only_broken(tmp_path / "mixed.parquet").why


def prefix(tmp_path: Path) -> tuple[Path, str]:
    write_tone(tmp_path / "q.wav")
    path = write_lines(tmp_path / "a.jsonl", [{"question_audio": "/far/q.wav"}, {"question_audio": "q.wav"}])
    broken = only_broken(path).why
    return path, broken.replace("--read.prefix", "--read.prefix /far/")


@pytest.mark.parametrize(("case", "rows"), [(table, 1), (units, 3), (packing, 2), (prefix, 2)])
def test_what_a_message_tells_to_say_reads_the_data(tmp_path, case, rows):
    path, message = case(tmp_path)
    (said,) = re.findall(r"--read\.\w+ (?:'[^']*'|\S+)", message)
    flags = shlex.split(said)
    assert prepared(path, tmp_path / "out", *flags) == rows
    asked = eval_command._parser().read(["model", "data", "--out", "out", *flags])["read"]
    assert asked == data_prepare._parser().read(["in", "out", *flags])["read"] != ReaderOptions()


def test_an_evaluation_reads_packed_codes_as_a_preparation_does(tmp_path):
    model = save_model(tmp_path / "model")
    data = write_parquet(tmp_path / "a.parquet", [packed(0), packed(1)])
    quick = (*QUICK, "--timed", "0", "--task", "A1T2")
    with pytest.raises(UserError, match=r"none of the 2 questions could be asked.*--read.packing mini-omni"):
        evaluate([str(model), str(data), "--out", str(tmp_path / "none"), *quick])
    said = ("--read.packing", "mini-omni")
    assert evaluate([str(model), str(data), "--out", str(tmp_path / "out"), *quick, *said]) == 0
    assert not any("broken" in record for record in read_lines(tmp_path / "out" / "answers.jsonl"))
