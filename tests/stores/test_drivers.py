"""Requests to a store: what is listed and read, what is tried again, and what users are told."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest

from omni.errors import PackageError, UserError
from omni.stores import drivers, tries
from omni.stores.drivers import list_objects, look_up, look_up_all, read_range, write_object
from omni.stores.tries import ChangedError, MissingError, may_pass, tried
from tests.stores.web import web

ROOT = Path(__file__).parents[2]


def test_only_the_drivers_know_fsspec() -> None:
    knows = [
        file for top in ("omni", "train", "infer") for file in (ROOT / top).rglob("*.py") if "import fsspec" in file.read_text()
    ]
    assert [path.name for path in knows] == ["drivers.py"]


def test_a_folder_is_listed_by_one_request(bucket: Any) -> None:
    for key in ("a/x", "a/y", "a/b/z", "a/", "ab/w"):
        bucket.put(key, key.encode())
    bucket.server.seen.clear()
    assert [one.name for one in list_objects(bucket.address("a"))] == ["x", "y"]
    assert bucket.server.seen == {"LIST": 1}
    found = list_objects(bucket.address("a"), deep=True)
    assert [one.address for one in found] == [bucket.address(key) for key in ("a/b/z", "a/x", "a/y")]
    assert [one.size for one in found] == [5, 3, 3] and all(one.version for one in found)
    assert bucket.server.seen == {"LIST": 2}


def test_a_version_changes_with_the_content(bucket: Any) -> None:
    address = bucket.put("a", b"one")
    first = look_up(address)
    bucket.put("a", b"two")
    second = look_up(address)
    assert first.size == second.size and first.version != second.version
    assert read_range(second, 1, 3) == b"wo"
    with pytest.raises(ChangedError, match=rf"{address} has changed"):
        read_range(first, 0, 3)


@pytest.mark.parametrize("size", [3, 100_000])
def test_what_is_written_is_read(bucket: Any, tmp_path: Path, size: int) -> None:
    (tmp_path / "f").write_bytes(bytes(range(100)) * (size // 100) or b"abc")
    write_object(tmp_path / "f", bucket.address("d/f"))
    write_object(b"last\n", bucket.address("d/last"))
    found = {one.name: read_range(one, 0, one.size) for one in look_up_all(bucket.address("d"))}
    assert found == {"f": (tmp_path / "f").read_bytes(), "last": b"last\n"}


def test_errors_and_cut_answers_are_tried_again(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(tries.LOG, "log", lambda level, text, *values: told.extend([text % values] * (level > logging.DEBUG)))
    data = bytes(range(256)) * 40
    one = look_up(bucket.put("a", data))
    bucket.server.errors, bucket.server.cuts = 0.2, 0.2
    for start in range(0, len(data), 256):
        assert read_range(one, start, start + 256) == data[:256]
    faults = bucket.server.faults
    assert faults["errors"] and faults["cuts"]
    assert 0 < len(told) <= sum(faults.values())  # a request that fails twice is told once
    assert all(one.address in line for line in told)


def test_a_stall_is_ended_and_tried_again(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = look_up(bucket.put("a", b"abc"))
    monkeypatch.setenv("OMNI_STORE_TIMEOUT", "1")
    bucket.server.stalls, bucket.server.stall = 1.0, 5.0
    monkeypatch.setattr(tries.LOG, "log", lambda *line: bucket.server.heal())  # when the first failure is told
    start = time.monotonic()
    assert read_range(one, 0, 3) == b"abc"
    assert bucket.server.faults == {} or time.monotonic() - start < 5


def test_what_goes_on_failing_is_told_with_its_address(bucket: Any) -> None:
    one = look_up(bucket.put("a", b"abc"))
    bucket.server.errors = 1.0
    with pytest.raises(UserError, match=rf"{one.address} cannot be read: .*503, {tries.TRIES} times; check") as error:
        read_range(one, 0, 3)
    assert error.value.again and bucket.server.faults["errors"] == tries.TRIES


@pytest.mark.parametrize("ask", [look_up, look_up_all, list_objects])
def test_what_is_not_there_is_not_tried_again(bucket: Any, ask: Any) -> None:
    bucket.put("model/config.json", b"{}")
    bucket.server.seen.clear()
    with pytest.raises(MissingError, match=f"{bucket.address('mode/l')} is not there.*check the name"):
        ask(bucket.address("mode/l"))
    assert sum(bucket.server.seen.values()) < 8
    with pytest.raises(MissingError, match="s3://no-such-bucket-here/x is not there: its bucket does not exist"):
        ask("s3://no-such-bucket-here/x")


def test_a_typo_is_told_with_the_closest_name(bucket: Any) -> None:
    bucket.put("rows/rows-00000.parquet", b"x")
    with pytest.raises(MissingError, match=rf"did you mean {bucket.address('rows/rows-00000.parquet')}\?"):
        look_up(bucket.address("rows/rows-0000.parquet"))


def test_a_bucket_without_rights(bucket: Any) -> None:
    one = look_up(bucket.put("a", b"abc"))
    denied = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
    bucket.server.denied = denied
    for work in (lambda: read_range(one, 0, 3), lambda: look_up(one.address), lambda: list_objects(bucket.address())):
        bucket.server.seen.clear()
        with pytest.raises(UserError, match=rf"s3://{bucket.name}.* cannot be \w+: it is not allowed .*AWS_PROFILE"):
            work()
        assert sum(bucket.server.seen.values()) == 1


def test_missing_credentials(bucket: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("OMNI_STORE_TIMEOUT", "14.5")  # a driver of its own, which knows no credentials yet
    with pytest.raises(UserError, match="there are no credentials .*AWS_ACCESS_KEY_ID.*FSSPEC_S3_ANON=true"):
        look_up(bucket.address("a"))


def test_a_missing_driver_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: Any, **named: Any) -> None:
        raise ImportError("no driver")

    monkeypatch.setattr("fsspec.filesystem", missing)
    for package, extra in (("s3fs", "s3"), ("gcsfs", "gs")):
        with pytest.raises(PackageError, match=rf'needs the package {package}: pip install "omni-speech\[{extra}\]"'):
            look_up(f"{extra}://bucket/a")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("s4://bucket/a", "start with s4:// are not read; did you mean 's3'"),
        ("abfs://bucket/a", "known: s3, gs, hf, https"),
        ("http://example.org/a", "is not encrypted: give its https:// address"),
        ("https://huggingface.co/org/name", "is a page: give hf://org/name"),
        ("s3a://bucket/name", "write s3:// in place of s3a://"),
        ("gcs://bucket/name", "write gs:// in place of gcs://"),
        ("https://example.org/folder/", None),
    ],
)
def test_addresses_that_cannot_be(address: str, said: str | None) -> None:
    with pytest.raises(UserError, match=said or "has no folders that can be listed"):
        list_objects(address) if said is None else look_up(address)


@pytest.mark.parametrize("name", ["../up", "a/../../up", "/etc/x", "nul\0"])
def test_a_name_that_leads_out_of_a_folder_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="no file in a folder can have"):
        drivers.inner_name(f"s3://b/m/{name}", "s3://b/m")


def test_a_timeout_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_STORE_TIMEOUT", "soon")
    with pytest.raises(UserError, match="OMNI_STORE_TIMEOUT is 'soon'; give seconds"):
        tries.stall_seconds()


def test_errors_that_may_pass() -> None:
    assert all(may_pass(error) for error in (TimeoutError(), ConnectionResetError(104, "x"), OSError(16, "busy")))
    assert not any(
        may_pass(error) for error in (FileNotFoundError(2, "x"), PermissionError(13, "x"), KeyError("x"), OSError(28, "full"))
    )
    asked = []
    with pytest.raises(UserError, match="s3://b/a cannot be read: 'x'; check"):
        tried(lambda: asked.append(1) or {}["x"], "s3://b/a")
    assert asked == [1]


def test_files_of_a_web_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tries, "FIRST_WAIT", 0.01)
    with web() as server:
        server.files["/d/a"] = bytes(range(100))
        server.failing = 3
        one = look_up(f"{server.address}/d/a?signature=secret")
        assert one.size == 100 and one.name == "a" and "secret" not in str(one)
        assert read_range(one, 10, 20) == bytes(range(10, 20))
        server.ranges = False
        assert read_range(one, 10, 20) == bytes(range(10, 20))
        server.files["/d/a"] = bytes(range(100, 200))
        with pytest.raises(ChangedError, match=r"/d/a\?… has changed"):
            read_range(one, 10, 20)
        with pytest.raises(MissingError, match="/d/b is not there: check the name"):
            look_up(f"{server.address}/d/b")
        with pytest.raises(UserError, match="cannot be written: give an address of s3 and gs"):
            write_object(__file__, f"{server.address}/d/a")
        server.failing = 100
        with pytest.raises(UserError, match="/d/a cannot be read: .*500.*, 6 times"):
            look_up(f"{server.address}/d/a")
        with pytest.raises(UserError, match=r"/d/c\?… cannot be read: .*500.*, 6 times") as failed:
            look_up(f"{server.address}/d/c?signature=secret")
        assert "secret" not in str(failed.value)
    with pytest.raises(UserError, match=r"/d/c\?… cannot be read: Cannot connect to host .*, 6 times") as failed:
        look_up("http://127.0.0.1:9/d/c?signature=secret")
    assert "secret" not in str(failed.value)
