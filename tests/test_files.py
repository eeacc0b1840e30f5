"""Files appear under their names only when they are whole, with the permissions of any file; one process works in a folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from threading import Timer

import pytest
import torch
from safetensors.torch import load_file

from omni.checkpoint.tensors import save_tensors
from omni.errors import UserError
from omni.files import (
    LOCK,
    PAGE,
    LargeFile,
    locked,
    pages,
    part_of,
    publish,
    read_json,
    replacing,
    write_json,
    write_whole,
    writing,
)


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    write_whole(file, "one")
    with pytest.raises(RuntimeError), replacing(file) as part:
        part.write_text("half")
        assert file.read_text() == "one"
        raise RuntimeError
    assert file.read_text() == "one" and os.listdir(tmp_path) == ["a.txt"]
    write_whole(file, b"two")
    assert file.read_bytes() == b"two" and os.listdir(tmp_path) == ["a.txt"]


def test_a_file_in_steps(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    part_of(file).write_text("left by a killed process")
    with part_of(file).open("w") as handle:
        handle.write("1")
        handle.write("2")
    assert not file.exists()
    publish(file)
    assert file.read_text() == "12" and os.listdir(tmp_path) == ["a.csv"]


def test_json_comes_back_and_damage_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_json(file, {"b": ["\u00fc", 1.5, None]})
    assert read_json(file, "") == {"b": ["\u00fc", 1.5, None]} == json.loads(file.read_text(encoding="utf-8"))
    write_json(file, {"path": "\udce9"})
    assert read_json(file, "") == {"path": "\udce9"}
    for content, said in (("{", "cannot be read"), ("[1]", "holds no JSON object")):
        file.write_text(content)
        with pytest.raises(UserError, match=rf"a.json {said}.*: fetch it again"):
            read_json(file, "fetch it again")
    with pytest.raises(UserError, match=r"b.json cannot be read .*No such file"):
        read_json(tmp_path / "b.json", "")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said_in_a_line(code: int) -> None:
    with pytest.raises(UserError, match=r"no space left.*somewhere"), writing("somewhere"):
        raise OSError(code, os.strerror(code))
    with pytest.raises(PermissionError), writing("somewhere"):
        raise PermissionError(errno.EACCES, "no right")


REFUSALS = ["nothing", "opening", "writing"]


@pytest.mark.parametrize("refused", REFUSALS)
@pytest.mark.parametrize("first", [0, 1, PAGE - 1, PAGE, 3 * PAGE + 5])
def test_a_large_file_holds_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, refused: str) -> None:
    """Aligned and other data in turn; on a file system that takes both past the page cache, and on those that do not."""
    monkeypatch.setattr(LargeFile, "BUFFER", 4 * PAGE)
    monkeypatch.setattr(LargeFile, "LEAST", 2 * PAGE)
    direct, write, opened = getattr(os, "O_DIRECT", 0), os.write, os.open
    wrote: list[int] = []

    def checked_open(path: str, flags: int, *mode: int) -> int:
        if refused == "opening" and flags & direct:
            raise OSError(errno.EINVAL, "no such flag")
        return opened(path, flags, *mode)

    def checked_write(file: int, data: memoryview) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & direct:
            if refused == "writing":
                raise OSError(errno.EINVAL, "not aligned")
            wrote.append(len(data))
        return write(file, data[: 7 * PAGE])  # the system may take less than it is given

    monkeypatch.setattr("os.open", checked_open)
    monkeypatch.setattr("os.write", checked_write)
    block = torch.frombuffer(pages(40 * PAGE), dtype=torch.uint8)
    block.copy_(torch.arange(40 * PAGE) % 251)
    end, other = 30 * PAGE + 7, torch.arange(9 * PAGE + 3).to(torch.uint8)
    with LargeFile(tmp_path / "file", 50 * PAGE) as file:
        file.write(block[:first].numpy())
        file.write(block[first : first + 9].numpy().tobytes())
        file.write(block[first + 9 : end].numpy())
        file.write(other.numpy())
        file.write(b"end")
    assert (tmp_path / "file").read_bytes() == block[:end].numpy().tobytes() + other.numpy().tobytes() + b"end"
    if refused == "nothing" and direct:
        assert all(size % PAGE == 0 for size in wrote) and max(wrote) > LargeFile.BUFFER  # aligned data are not copied
    with LargeFile(tmp_path / "small", PAGE) as file:
        file.write(b"small")
    assert (tmp_path / "small").read_bytes() == b"small"


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_files_have_the_permissions_of_any_file(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write_whole(tmp_path / "text", "")
        save_tensors({"a": torch.arange(3)}, tmp_path / "tensors", {"kept": "note"})
    finally:
        os.umask(before)
    assert load_file(tmp_path / "tensors")["a"].tolist() == [0, 1, 2]
    for name in ("text", "tensors"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o666 & ~mask


def test_one_process_works_in_a_folder(tmp_path: Path) -> None:
    """Others are refused, also in the same process; a lock ends with its process, however that ends."""
    other = "import os, sys\nfrom pathlib import Path\nfrom omni.files import locked\nwith locked(Path(sys.argv[1])):\n    {}"

    def start(work: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", other.format(work), str(tmp_path / "a")], capture_output=True, text=True)

    with locked(tmp_path / "a"):
        assert json.loads((tmp_path / "a" / LOCK).read_text())["pid"] == os.getpid()
        with pytest.raises(UserError, match=rf"a is in use: process {os.getpid()} on .*; wait for it"), locked(tmp_path / "a"):
            pass
        assert f"in use: process {os.getpid()} on" in start("pass").stderr
    assert start("os.kill(os.getpid(), 9)").returncode == -9
    with locked(tmp_path / "a"):
        pass


def test_a_lock_that_its_holder_is_about_to_give_back_is_waited_for(tmp_path: Path) -> None:
    with ExitStack() as holder:
        holder.enter_context(locked(tmp_path))
        Timer(0.2, holder.close).start()
        with locked(tmp_path, wait=30):
            assert str(os.getpid()) in (tmp_path / LOCK).read_text()


def test_a_folder_that_is_renamed_while_it_is_locked_is_free_again(tmp_path: Path) -> None:
    work = tmp_path / "work"
    with locked(work):
        work.rename(tmp_path / "done")
        (tmp_path / "done" / LOCK).unlink()
        with locked(work):
            assert work.is_dir()
