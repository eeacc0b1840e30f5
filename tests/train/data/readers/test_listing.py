"""Listing of folders: the order of a plain sort, in memory that does not grow with the files."""

from __future__ import annotations

import hashlib
import os
import pickle
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

import pytest

from omni.errors import UserError
from train.data.prepare.settings import _files
from train.data.readers import ReaderOptions, listing, open_source
from train.data.readers.folders import SoundFiles
from train.data.readers.listing import FolderListing, sorted_walk, walk

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


def plain_files(folder: Path) -> str:
    """The fingerprint of a folder as outputs of earlier versions have it."""
    sizes = []
    for place, _, names in os.walk(folder):
        for name in names:
            if not name.startswith("."):
                file = os.path.join(place, name)
                sizes.append((file.removeprefix(str(folder)), os.stat(file).st_size if os.path.exists(file) else 0))
    digest = hashlib.sha256()
    for name, size in sorted(sizes):
        digest.update(os.fsencode(name) + f"\0{size}\0".encode())
    return f"{len(sizes)} files, {sum(size for _, size in sizes)} bytes ({digest.hexdigest()[:16]})"


@pytest.mark.parametrize("held", [1, 2, 1000])
def test_the_order_is_that_of_a_plain_sort(held: int, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "HELD", held)
    monkeypatch.setattr(listing, "BATCH", 3)
    every = [file for file in tree.rglob("*") if not file.is_dir()]
    assert len(every) > 20 and any("b\udcff" in str(file) for file in every)
    assert [tree / name for name, _ in sorted_walk(tree)] == sorted(every)
    assert [str(tree / name) for name, _ in sorted_walk(tree, as_text=True)] == sorted(map(str, every))
    assert [there for _, there in sorted_walk(tree)] == [file.is_file() for file in sorted(every)]
    assert {entry.path for entry in walk(tree)} == set(map(str, every))
    shown = [f for f in sorted(every) if f.is_file() and not any(p.startswith(".") for p in f.relative_to(tree).parts)]
    assert {e.path for e in walk(tree, hidden=False) if e.is_file()} == set(map(str, shown))
    found = FolderListing(tree, len)
    assert len(found) == len(shown) and [tree / name for name in found.names()] == shown
    for start, stop in ((0, 1), (2, 5), (3, 6), (len(shown) - 1, None), (4, 4), (5, 999)):
        assert [tree / name for name in found.names(start, stop)] == shown[start:stop]
    assert _files(tree) == plain_files(tree)


def test_memory_does_not_grow_with_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        def __init__(self, number: int) -> None:
            self.name = f"common_voice_en_{number * 7919 % 1_000_003:08d}.flac"

        def is_dir(self) -> bool:
            return False

        def is_file(self) -> bool:
            return True

    @contextmanager
    def scandir(folder: str):
        yield map(Entry, range(count))

    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.setattr(listing, "HELD", 1000)
    monkeypatch.setattr(listing, "BATCH", 100)
    peaks = []
    for count in (10, 5_000, 50_000):
        wanted = sorted(Entry(i).name for i in range(count))
        tracemalloc.start()
        found = FolderListing(Path("data"), len)
        assert all(name == other for name, other in zip(found.names(), wanted, strict=True))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < peaks[1] + 45_000  # a byte a file


def test_a_listing_that_is_gone_is_made_again_and_another_one_refused(tmp_path: Path) -> None:
    for name in ("b.flac", "a.wav", "c/d.mp3"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(b"sound")
    source = SoundFiles(tmp_path / "data")
    sent = pickle.dumps(source)
    wanted = [tmp_path / "data" / name for name in ("a.wav", "b.flac", "c/d.mp3")]
    other = pickle.loads(sent)
    assert [Path(record.data["path"]) for record in other.iterate()] == wanted
    file = Path(source._listing._file)
    del source
    assert not file.exists()  # it goes with the one that made it
    other = pickle.loads(sent)
    assert [Path(record.data["path"]) for record in other.iterate(1, 3)] == wanted[1:]
    assert not Path(other._listing._file).exists()  # nothing is left where that process is killed
    assert [Path(record.data["path"]) for record in other.iterate()] == wanted
    (tmp_path / "data" / "a.wav").rename(tmp_path / "data" / "e.wav")
    with pytest.raises(UserError, match=r"data had 3 files when it was listed, and has others now \(3\)"):
        list(pickle.loads(sent).iterate(0, 1))


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
