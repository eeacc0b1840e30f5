"""The read-through cache: its limit, its keys, several processes, and disks that are full or cannot be written."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from omni.errors import UserError
from omni.stores import cache as cache_module
from omni.stores.cache import StoreCache, key_of, limit_bytes


@pytest.fixture
def cache(tmp_path: Path) -> StoreCache:
    return StoreCache(tmp_path / "stores")


def fill(cache: StoreCache, name: str, size: int, age: float = 0) -> Path:
    """Put a folder of one file into the cache, used `age` seconds ago by a process that has ended."""
    cache = StoreCache(cache.folder)
    with cache.filling(key_of(name), size, f"s3://b/{name}") as folder:
        assert folder is not None
        (folder / "f").write_bytes(b"x" * size)
    for handle in cache._held.values():
        os.close(handle)
    place = cache.entry(key_of(name))
    state = place.stat()
    os.utime(place, (state.st_atime, state.st_mtime - age))
    return place


def test_blocks_are_kept_and_damaged_ones_are_not_read(cache: StoreCache) -> None:
    assert cache.read_block("ab1") is None
    cache.write_block("ab1", b"block")
    assert cache.read_block("ab1") == b"block"
    file = cache.folder / "blocks" / "ab" / "ab1"
    file.write_bytes(b"blick" + file.read_bytes()[5:])
    assert cache.read_block("ab1") is None
    file.write_bytes(b"")
    assert cache.read_block("ab1") is None


def test_the_oldest_go_first(cache: StoreCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_CACHE_GB", "1e-6")  # 1,000 bytes
    places = [fill(cache, name, 300, age) for name, age in (("a", 30), ("b", 90), ("c", 60))]
    cache.shrink(limit_bytes())
    assert [place.is_dir() for place in places] == [True] * 3
    new = fill(cache, "d", 300)
    assert [place.is_dir() for place in (*places, new)] == [True, False, True, True]


def test_what_comes_stays_where_all_else_is_in_use(cache: StoreCache, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(cache, "old", 900)
    other = StoreCache(cache.folder)
    assert other.hold(key_of("old"))
    monkeypatch.setenv("OMNI_CACHE_GB", "1e-6")  # 1,000 bytes
    with cache.filling("new", 800, "s3://b/new") as folder:
        assert folder is not None
        (folder / "data").write_bytes(b"n" * 800)
    assert cache.hold("new") and cache.hold(key_of("old"))


def test_what_a_process_uses_stays(cache: StoreCache, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {name: fill(cache, name, 300, age) for name, age in (("a", 90), ("b", 60), ("c", 30))}
    assert cache.hold(key_of("a")) == places["a"]
    os.utime(places["a"], (0, 0))
    other = (
        "import sys; from pathlib import Path; from omni.stores.cache import StoreCache;"
        "StoreCache(Path(sys.argv[1])).shrink(400)"
    )
    subprocess.run([sys.executable, "-c", other, str(cache.folder)], check=True, timeout=300)
    assert [place.is_dir() for place in places.values()] == [True, False, False]
    assert cache.hold(key_of("b")) is None


def test_one_of_several_fills_and_the_others_wait(cache: StoreCache) -> None:
    came, filled = threading.Barrier(4), []

    def work() -> None:
        came.wait()
        with StoreCache(cache.folder).filling(key_of("a"), 1, "s3://b/a") as folder:
            if folder is not None:
                filled.append(folder)
                (folder / "f").write_bytes(b"x")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(filled) == 1 and (cache.entry(key_of("a")) / "f").read_bytes() == b"x"


def test_an_entry_appears_whole(cache: StoreCache) -> None:
    with pytest.raises(RuntimeError), cache.filling(key_of("a"), 1, "s3://b/a") as folder:
        assert folder is not None
        (folder / "f").write_bytes(b"x")
        raise RuntimeError
    assert not cache.entry(key_of("a")).exists() and not list((cache.folder / "files").glob("*.part"))


def test_a_full_disk(cache: StoreCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    told: list[str] = []
    monkeypatch.setattr(cache_module.LOG, "warning", lambda text, *values: told.append(text % values))
    monkeypatch.setattr(Path, "write_bytes", full)
    cache.write_block("ab1", b"block")
    cache.write_block("ab2", b"block")
    assert len(told) == 1 and "No space left" in told[0] and "data are read without it" in told[0]
    assert cache.read_block("ab1") == b"block" and StoreCache(cache.folder).read_block("ab1") is None
    said = r"s3://b/a cannot be kept in the cache .* \(no space left; it needs 5 bytes\): free some space, or set OMNI_CACHE"
    with pytest.raises(UserError, match=said):
        fill(cache, "a", 5)
    assert not cache.entry(key_of("a")).exists()


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    cache = StoreCache(tmp_path / "file" / "stores")
    for number in range(20):  # memory keeps a few
        cache.write_block(f"ab{number}", b"%d" % number)
    assert [number for number in range(20) if cache.read_block(f"ab{number}") == b"%d" % number] == list(range(4, 20))
    with pytest.raises(UserError, match="cannot be kept in the cache .*Not a directory"):
        fill(cache, "a", 5)


def test_more_than_the_cache_may_have(cache: StoreCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_CACHE_GB", "1e-6")
    said = r"s3://b/a has 1,001 bytes, and the cache .* may have 1,000 bytes: set OMNI_CACHE_GB to more"
    with pytest.raises(UserError, match=said):
        fill(cache, "a", 1001)
    monkeypatch.setenv("OMNI_CACHE_GB", "0")
    cache.write_block("ab1", b"block")
    assert StoreCache(cache.folder).read_block("ab1") is None
    monkeypatch.setenv("OMNI_CACHE_GB", "much")
    with pytest.raises(UserError, match="OMNI_CACHE_GB is 'much'; give gigabytes"):
        limit_bytes()
