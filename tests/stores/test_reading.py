"""Files and folders of a store here, and objects that are open at any place."""

from __future__ import annotations

import io
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from omni import stores
from omni.errors import UserError
from omni.files import cache_folder
from omni.stores import reading
from omni.stores.cache import POINTERS, own_cache, pointed_at, stored_size
from omni.stores.drivers import look_up, read_range
from omni.stores.reading import BLOCK, ObjectReader, guarded, local_path
from omni.stores.tries import ChangedError, StoreError
from omni.utils.remote import find_address
from tests.stores.web import web


def files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_paths_of_this_machine_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_path(tmp_path) == tmp_path and local_path("nowhere/x") == Path("nowhere/x")
    (tmp_path / "s3:" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert local_path("s3://b") == Path("s3://b")


def test_a_folder_comes_whole_and_once(bucket: Any, tmp_path: Path) -> None:
    wanted = {"a": b"abc", "d/b": os.urandom(3 * BLOCK), "empty": b""}
    for name, data in wanted.items():
        bucket.put(f"m/x/{name}", data)
    bucket.put("m/xy", b"beside")
    place = local_path(bucket.address("m/x"))
    assert files(place) == wanted and place.name == "x"
    bucket.server.seen.clear()
    assert local_path(Path(bucket.address("m/x"))) == place  # Path makes one slash of two
    assert local_path(bucket.address("m/x/")) == place
    assert not bucket.server.seen
    assert local_path(bucket.address("m/x"), again=True) == place
    assert bucket.server.seen == {"LIST": 1}
    assert local_path(bucket.address("m/x/a")).read_bytes() == b"abc"


def test_what_has_changed_is_another_entry(bucket: Any) -> None:
    first = local_path(bucket.put("m/a", b"one"))
    bucket.put("m/a", b"two")
    second = local_path(bucket.address("m/a"), again=True)
    assert (first.read_bytes(), second.read_bytes()) == (b"one", b"two")


def test_pointer_files_stand_for_what_stays(bucket: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sounds = {"a.wav": b"w" * 3000, "b/C.FLAC": b"f" * 4000, "rows.parquet": b"p" * 5000}
    for name, data in sounds.items():
        bucket.put(f"pointers/{name}", data)
    bucket.put("pointers/list.csv", b"here")
    bucket.server.seen.clear()
    folder = local_path(bucket.address("pointers"), pointers=True)
    assert bucket.server.seen["GET"] == 1 and (folder / "list.csv").read_bytes() == b"here"
    for name, data in sounds.items():
        one = pointed_at(folder / name)
        assert one is not None and read_range(one, 0, one.size) == data
        assert stored_size(folder / name) == len(data) and (folder / name).stat().st_size < 200
    whole = local_path(bucket.address("pointers"))
    for name, data in (sounds | {"list.csv": b"here"}).items():
        assert (whole / name).read_bytes() == data and pointed_at(whole / name) is None
    assert pointed_at(folder / "list.csv") is None and pointed_at(folder / "none.wav") is None
    (tmp_path / "link").symlink_to(cache_folder())
    monkeypatch.setenv("OMNI_CACHE", str(tmp_path / "link"))
    linked = local_path(bucket.address("pointers"), again=True, pointers=True)
    assert linked.is_relative_to(tmp_path / "link") and pointed_at(linked / "a.wav") == pointed_at((linked / "a.wav").resolve())
    assert pointed_at(linked / "a.wav") is not None
    (folder / "a.wav").write_bytes(b"")
    with pytest.raises(UserError, match=r"a\.wav in the cache is damaged .* remove the folder .*files/[0-9a-f]{40}-pointers$"):
        pointed_at(linked / "a.wav")
    local = tmp_path / "own.wav"  # nobody's data can point anywhere
    shutil.copy(folder / "rows.parquet", local)
    assert pointed_at(local) is None
    copied = whole / "a.wav"
    shutil.copy(folder / "rows.parquet", copied)
    assert pointed_at(copied) is None


def test_names_with_signs_are_files_of_their_own(bucket: Any) -> None:
    names = ["a.wav", "a.wav?v=2", "b:1.wav", "b\\1.wav", "c d/%20#+.wav", "?"]
    for name in names:
        bucket.put(f"signs/{name}", name.encode())
    for pointers in (False, True):
        folder = local_path(bucket.address("signs"), pointers=pointers)
        for name in names:
            one = pointed_at(folder / name)
            assert (one is not None) == (pointers and name.endswith(".wav"))
            assert (read_range(one, 0, one.size) if one else (folder / name).read_bytes()) == name.encode()
    assert local_path(bucket.address("signs/a.wav?v=2")).read_bytes() == b"a.wav?v=2"


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ("x/a.wav", "x//a.wav", "would be the same file here: rename one of them"),
        ("a.wav", "a.wav/b.wav", r"cannot be kept in the cache .*: a\.wav; it needs"),
        ("a.wav", "b" * 300, r"cannot be kept in the cache .*File name too long: bbb"),
    ],
)
def test_names_that_no_folder_has(one: str, other: str, said: str, bucket: Any) -> None:
    for name in (one, other):
        bucket.put(f"set/{name}", b"x")
    for pointers in (False, True):
        with pytest.raises(UserError, match=said):
            local_path(bucket.address("set"), pointers=pointers)


@pytest.mark.parametrize("place", ["relative", "up", "link", "inner"])
def test_wherever_the_cache_is(place: str, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "disk").mkdir()
    (tmp_path / "with" / "stores").mkdir(parents=True)
    (tmp_path / "with" / "stores" / "files").symlink_to(tmp_path / "disk")
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    monkeypatch.setenv("OMNI_CACHE", {"relative": "cache", "up": f"{tmp_path}/with/../up", "inner": "with"}.get(place, place))
    folder = local_path(bucket.put("set/a.wav", b"sound").removesuffix("/a.wav"), pointers=True)
    assert pointed_at(folder / "a.wav") is not None and pointed_at((folder / "a.wav").resolve()) is not None


def test_a_file_that_was_cut_in_the_cache_is_told(bucket: Any) -> None:
    address = bucket.put("set/a.csv", b"sound").removesuffix("/a.csv")
    for pointers in (False, True):
        (local_path(address, pointers=pointers) / "a.csv").write_bytes(b"so")
        with pytest.raises(StoreError, match=r"the cache's folder .* is damaged: remove it, and run the same command again"):
            local_path(address, again=True, pointers=pointers)
        shutil.rmtree(cache_folder() / "stores" / "files")
    bucket.put("set/a.wav", b"sound")
    folder = local_path(address, again=True, pointers=True)
    (folder.parent / POINTERS).unlink()
    with pytest.raises(StoreError, match="is damaged: remove it"):
        local_path(address, again=True, pointers=True)


def test_a_library_in_c_is_told_of_no_failure_and_the_caller_is(bucket: Any, capfd: pytest.CaptureFixture[str]) -> None:
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, [0.25] * 40_000, 16000, format="WAV", subtype="PCM_16")
    one = look_up(bucket.put("sound.wav", buffer.getvalue()))
    with guarded(one) as source, soundfile.SoundFile(source) as file:
        file.seek(39_000)
        assert file.read().tolist() == [0.25] * 1000
    bucket.server.broken = lambda environ: environ["REQUEST_METHOD"] == "GET"
    own_cache().shrink(0)
    with pytest.raises(StoreError, match=r"sound\.wav cannot be read"), guarded(one) as source:
        soundfile.SoundFile(source)
    assert capfd.readouterr().err == ""


@pytest.mark.long
def test_another_process_finds_it_in_the_cache(bucket: Any) -> None:
    place = local_path(bucket.put("m/a", b"one"))
    bucket.server.seen.clear()
    code = "import sys; from omni.stores.reading import local_path; print(local_path(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, bucket.address("m/a")], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == str(place), done.stderr
    assert not bucket.server.seen["GET"]


def test_an_entry_that_was_deleted_is_fetched_again(bucket: Any) -> None:
    address = bucket.put("m/a", b"one")
    shutil.rmtree(local_path(address).parent)
    assert local_path(address).read_bytes() == b"one"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kept", [True, False], ids=["cached", "uncached"])
def test_reading_at_any_place(bucket: Any, monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    if not kept:
        monkeypatch.setenv("OMNI_CACHE_GB", "0")
        monkeypatch.setattr(stores.cache, "RECENT", 2)
    monkeypatch.setattr(reading, "BLOCK", 100)
    monkeypatch.setattr(reading, "PIECE", 400)
    data, dice = os.urandom(1234), random.Random(0)
    with ObjectReader(look_up(bucket.put("a", data))) as file:
        for _ in range(40):
            start, size = dice.randrange(1300), dice.randrange(600)
            assert file.seek(start) == start
            assert file.read(size) == data[start : start + size]
            assert file.tell() == start + len(data[start : start + size])
        assert file.seek(-10, os.SEEK_END) == 1224 and file.read() == data[-10:]
        file.seek(0)
        assert file.readall() == data
    gets = bucket.server.seen["GET"]
    assert gets <= 13 if kept else gets > 20


def test_blocks_side_by_side_are_one_request(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BLOCK", 100)
    file = ObjectReader(look_up(bucket.put("a", bytes(1000))))
    file.seek(150)
    file.read(500)
    assert bucket.server.seen["GET"] == 1
    file.seek(0)
    file.read(1000)
    assert bucket.server.seen["GET"] == 3  # before and after


def test_an_object_that_changes_while_it_is_read(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BLOCK", 100)
    file = ObjectReader(look_up(bucket.put("a", bytes(1000))))
    assert file.read(100) == bytes(100)
    bucket.put("a", b"x" * 1000)
    with pytest.raises(ChangedError, match=f"{bucket.address('a')} has changed"):
        file.read(100)


def test_a_folder_that_changes_while_it_comes(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = reading.look_up_all(bucket.put("m/a", b"one"))
    bucket.put("m/a", b"two")
    with pytest.raises(ChangedError, match="has changed"):
        reading.fetch(bucket.address("m/a"), objects)


def test_a_file_of_a_web_server_comes(bucket: Any) -> None:
    with web() as server:
        server.files["/d/a.csv"] = b"a,b\n"
        place = local_path(f"{server.address}/d/a.csv?signature=1")
        assert place.name == "a.csv" and place.read_bytes() == b"a,b\n"
        with pytest.raises(UserError, match="/d is not there"):
            local_path(f"{server.address}/d")


def test_errors_about_files_in_the_cache_name_the_address(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="s3://b/m/config.json is damaged"), reading.naming("s3://b/m", tmp_path):
        raise UserError(f"{tmp_path}/config.json is damaged")
    assert find_address(tmp_path) is None


@pytest.mark.long
def test_a_server_with_a_certificate(tmp_path: Path) -> None:
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    made += ["-addext", "subjectAltName=DNS:localhost", "-keyout", "key.pem", "-out", "own.pem"]
    try:
        subprocess.run(made, cwd=tmp_path, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no openssl here")
    both = tmp_path / "both.pem"
    both.write_text((tmp_path / "key.pem").read_text() + (tmp_path / "own.pem").read_text())
    code = "import sys; from omni.stores.reading import local_path; print(local_path(sys.argv[1]).read_text())"
    with web(both) as server:
        server.files["/a.txt"] = b"over TLS"
        trusts = os.environ | {"SSL_CERT_FILE": str(tmp_path / "own.pem"), "OMNI_CACHE": str(tmp_path / "cache")}
        words = [sys.executable, "-c", code, f"{server.address}/a.txt"]
        done = subprocess.run(words, env=trusts, capture_output=True, text=True, timeout=300)
        assert done.stdout.strip() == "over TLS", done.stderr
        trusts["SSL_CERT_FILE"] = str(tmp_path / "none.pem")
        done = subprocess.run(words, env=trusts, capture_output=True, text=True, timeout=300)
        assert "certificate verify failed" in done.stderr and ", 6 times" not in done.stderr
