"""Listing of folders: the order of a plain sort."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni.errors import UserError
from train.data.readers import ReaderOptions, open_source
from train.data.readers.files import list_files

NAMES = ["a", "a.flac", "a b", "a-b", ".hidden", "é", "\U0001f600", "ꬰ", "b\udcff", "b\udcfe", "A", "a\nb", "a\x01"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Files, folders and links with names whose order is easily mistaken."""
    root = tmp_path / "tree"
    for outer in ("", *NAMES[::2]):
        for number, name in enumerate(NAMES):
            place = root / outer / name
            if outer == name or (not outer and name in NAMES[::2]):
                continue
            for file in (place / "x", place / "x.flac") if number % 3 == 0 and outer else (place,):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(b"x" * number)
    (root / "to-folder").symlink_to(tmp_path)
    (root / "to-file").symlink_to(__file__)
    (root / "to-nothing").symlink_to("nowhere")
    return root


def test_the_order_is_that_of_a_plain_sort(tree: Path) -> None:
    every = [file for file in sorted(tree.rglob("*")) if not file.is_dir() and file.relative_to(tree).parts[0] != "to-folder"]
    shown = [file for file in every if not any(part.startswith(".") for part in file.relative_to(tree).parts)]
    assert len(shown) > 20 and any("b\udcff" in str(file) for file in shown)
    assert [Path(file) for file in list_files(tree)] == shown
    assert [Path(file) for file in list_files(tree, (".flac",))] == [file for file in shown if file.suffix == ".flac"]
    assert [Path(file) for file in list_files(tree, depth=0)] == [file for file in shown if file.parent == tree]
    assert list(list_files(tree / "nowhere")) == []


def test_a_folder_of_recordings_is_recognised_by_all_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "a" / ".git").mkdir(parents=True)
    for name in ("a/b.wav", "a/.git/notes", ".hidden.txt", "c.FLAC"):
        (tmp_path / name).write_bytes(b"sound")
    source = open_source(tmp_path, ReaderOptions())
    assert source.format == "recordings" and len(source) == 2
    assert [item.where for item in source] == [str(tmp_path / "a/b.wav"), str(tmp_path / "c.FLAC")]
    (tmp_path / "notes.txt").write_text("more")
    with pytest.raises(UserError, match="of no format known here"):
        open_source(tmp_path, ReaderOptions())
