"""Golden files: what others rely on stays as it is, however the code is arranged.

File formats, names of tensors, commands and their help, JSON and CSV fields, and what `omni` offers are compared with
`tests/golden`, which `python -m tests.golden.write` wrote. A test that fails here says that somebody's files, scripts or
checkpoints would no longer fit; where that is meant, write the golden files again and look at their difference.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.golden import faces, toys
from tests.golden.toys import HERE, RUNS

pytestmark = pytest.mark.untrained("*")  # runs of a step or two, in which not every task is drawn


def golden(name: str) -> Any:
    return json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder to work in, with copies of what golden folders there are."""
    with toys.inside(tmp_path):
        toys.place(tmp_path, "model", "rows", "adapter", "edits")
        yield tmp_path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The same, and what the commands make of it now: rows, runs, edits; and what is in the runs' checkpoints."""
    folder = tmp_path_factory.mktemp("made")
    with toys.inside(folder):
        toys.place(folder, "model", "rows", "adapter", "edits")
        faces.prepare_rows(Path("prepared"))
        training = faces.train()
        faces.teach("taught")
    return folder, training


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_every_configuration_has_its_tensors_and_keeps_their_values(place: Path) -> None:
    found, wanted = faces.state_dicts(), golden("state_dicts")
    assert found.keys() == wanted.keys()
    for name, entry in found.items():
        assert entry == wanted[name], name


def test_a_model_folder_is_read_and_written_byte_for_byte(place: Path) -> None:
    toys.save_again(Path("model"), Path("again"))
    faces.save_model(Path("new"))
    assert files_of(place / "again") == files_of(place / "model") == files_of(place / "new")


def test_answers_stay_the_same(place: Path) -> None:
    found, wanted = faces.every_answer(), golden("answers")
    for name, answers in wanted.items():
        assert found[name] == answers, name
    assert len({json.dumps(answers) for answers in wanted.values()}) == 4  # adapter and edits say something of their own


def without_codes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows whose codes are replaced by how many there are: a codec's last bit may be another one on another processor."""
    for row in rows:
        for turn in row["turns"]:
            frames = turn["answer_codes"]["frames"]
            turn["answer_codes"]["frames"] = [len(stream.split()) for stream in frames]
    return rows


def test_rows_are_read(place: Path) -> None:
    assert faces.rows() == golden("rows")
    faces.rows_again("rows", "again")
    assert faces.schema_of(place / "again")["columns"] == golden("rows")["columns"]
    assert faces.fields_of(place / "again") == golden("rows")["rows"]


def test_rows_are_prepared_as_they_were(made: tuple[Path, dict[str, Any]]) -> None:
    wanted, prepared = golden("rows"), made[0] / "prepared"
    rows = wanted.pop("rows")
    found = faces.schema_of(prepared)
    assert found == wanted
    assert without_codes(faces.fields_of(prepared)) == without_codes(rows)


def test_a_run_goes_on_from_its_checkpoint(place: Path) -> None:
    shutil.copytree(HERE / "checkpoint", "resumed")
    found = faces.fit("resumed", **RUNS["whole"])
    training = golden("training")
    end = faces.last_loss(Path("resumed"))
    assert end["step"] == training["end"]["step"] == toys.RECIPE["budget"]["steps"]
    assert end["loss"] == pytest.approx(training["end"]["loss"], rel=1e-4)
    assert found == training["runs"]["whole"]


def test_checkpoints_hold_what_they_held(made: tuple[Path, dict[str, Any]]) -> None:
    found, wanted = made[1]["runs"], golden("training")["runs"]
    assert found.keys() == wanted.keys()
    for name, run in found.items():
        assert run == wanted[name], name


@pytest.fixture
def again(made: tuple[Path, dict[str, Any]]) -> Iterator[Path]:
    """In the folder of all that was made."""
    with toys.inside(made[0]):
        yield made[0]


def test_folders_of_other_projects(again: Path) -> None:
    assert faces.exports() == golden("exports")


@pytest.mark.long
def test_json_and_other_tensors(again: Path) -> None:
    found, wanted = faces.json_outputs(), golden("json_outputs")
    assert found.keys() == wanted.keys()
    for name, keys in found.items():
        assert keys == wanted[name], name
    assert faces.tensor_files() == golden("tensor_files")


def test_csv_headers(again: Path) -> None:
    assert faces.csv_headers() == golden("csv_headers")


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="argparse of another Python words and wraps help otherwise")
def test_help_says_what_it_said() -> None:
    found, wanted = faces.helps(), golden("help")
    assert found.keys() == wanted.keys()
    for line, text in found.items():
        assert text == wanted[line], line


def test_public_names() -> None:
    assert faces.public_names() == golden("public_names")
