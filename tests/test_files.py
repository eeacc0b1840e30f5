"""Files appear under their names only when they are whole, with the permissions of any file; one process works in a folder."""

from __future__ import annotations

import errno
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
from omni.files import LOCK, locked, part_of, publish, read_json, replacing, write_json, write_whole, writing


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
    for content, said in (("{", "is damaged"), ("[1]", "holds no JSON object")):
        file.write_text(content)
        with pytest.raises(UserError, match=rf"a.json {said}.*: fetch it again"):
            read_json(file, "fetch it again")
    with pytest.raises(UserError, match=r"b.json is damaged .*No such file"):
        read_json(tmp_path / "b.json", "")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said_in_a_line(code: int) -> None:
    with pytest.raises(UserError, match=r"no space left.*somewhere"), writing("somewhere"):
        raise OSError(code, os.strerror(code))
    with pytest.raises(PermissionError), writing("somewhere"):
        raise PermissionError(errno.EACCES, "no right")


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
