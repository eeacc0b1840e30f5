"""Lazy tensors and the streaming writer: what is read in pieces is what was written, and a full disk leaves nothing."""

from __future__ import annotations

import errno
import json
import struct
import weakref
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from omni.checkpoint import tensors as safe
from omni.checkpoint.tensors import DTYPES as KNOWN
from omni.checkpoint.tensors import PT, read_safetensors, read_weights, save_tensors
from omni.convert.lazy import FLOATS, Lazy, LazyTensors, cast, joined, lazies_of
from omni.errors import UserError
from omni.files import replacing_folder

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@pytest.fixture(autouse=True)
def real_disk(quick_disk, monkeypatch):
    monkeypatch.setattr("os.fsync", quick_disk)


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"table": (700, 6), "vector": (33,), "cube": (5, 3, 2), "scalar": (), "none": (0, 4), "row": (1, 50)}
    return {
        f"{name}.{i}": (torch.randn(shape) * 9).to(dtype)
        for name, shape in shapes.items()
        for i, dtype in enumerate(DTYPES)
    }  # fmt: skip


@pytest.mark.parametrize("piece", [1, 100, 8 << 20])
def test_what_is_written_in_pieces_is_what_the_reference_reads(piece, monkeypatch, tmp_path):
    monkeypatch.setattr(safe, "PIECE", piece)
    want, seen = tensors(), []
    path = tmp_path / "a.safetensors"
    stamp = save_tensors(want, path, PT, on_progress=lambda done, total: seen.append((done, total)))
    assert stamp.bytes == path.stat().st_size and stamp.crc32 == zlib.crc32(path.read_bytes())
    back = load_file(path)
    assert back.keys() == want.keys()
    assert all(torch.equal(back[n], t) and back[n].dtype == t.dtype for n, t in want.items())
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert seen == sorted(seen) and seen[-1] == (seen[0][1], seen[0][1])


@pytest.mark.parametrize("notes", [None, {}, {"kept": 'a "note"'}])
@pytest.mark.parametrize("piece", [1, 100, 8 << 20])
def test_tensors_are_saved_byte_for_byte_as_the_reference_saves_them(piece, notes, monkeypatch, tmp_path):
    monkeypatch.setattr(safe, "PIECE", piece)
    want = tensors() | {f"{code}.é": torch.arange(7).to(dtype) for code, dtype in KNOWN.items()}
    save_file(want, tmp_path / "theirs", notes)
    want["table.0"] = want["table.0"].T.contiguous().T  # theirs refuses what is not contiguous
    save_tensors(want, tmp_path / "ours", notes)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_of_tensors_that_are_made_when_they_are_written_one_is_held(monkeypatch, tmp_path):
    monkeypatch.setattr(safe, "PIECE", 100)
    references, most, made = [], [], []

    def alive():
        return sum(reference() is not None for reference in references)

    def make(number):
        most.append(alive())
        made.append(number)
        array = np.full((40, 5), number, np.float32)  # unlike a tensor, alive as long as its memory
        references.append(weakref.ref(array))
        return torch.from_numpy(array)

    lazies = {f"t{number}": Lazy.once((40, 5), torch.float32, partial(make, number)) for number in range(6)}
    save_tensors(lazies, tmp_path / "a")
    assert made == list(range(6)) and most == [0] * 6 and not alive()
    back = load_file(tmp_path / "a")
    assert all(bool((back[f"t{number}"] == number).all()) for number in range(6))
    held = LazyTensors(lazies)
    assert lazies_of(held) == lazies and made == list(range(6)) and list(held) == list(lazies)
    same = torch.equal(held["t3"], back["t3"])
    assert same and made[6:] == [3] and not alive()


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_tensors_that_are_not_finite_are_named_once(bad, dtype, monkeypatch, tmp_path):
    monkeypatch.setattr(safe, "PIECE", 64)
    want = {name: torch.full((100, 3), torch.finfo(torch.float16).max).to(dtype) for name in "abc"}
    want |= {"none": torch.ones(0, 3), "whole": torch.ones(3, dtype=torch.long)}
    kept = {name: Lazy.of(tensor) for name, tensor in want.items()}
    assert save_tensors(kept, tmp_path / "a").nonfinite == ()
    for row in (1, 2, 99):
        want["b"][row, 2] = float(bad)
    assert save_tensors(kept, tmp_path / "a").nonfinite == ("b",)


def test_what_the_reference_writes_is_read_row_by_row(tmp_path):
    want = tensors()
    save_file(want, tmp_path / "model.safetensors")
    found = read_weights(tmp_path)
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(found[name](), tensor) and found[name].shape == tensor.shape
        if tensor.ndim:
            assert torch.equal(found[name].rows(0, len(tensor)).read(len(tensor) // 2, len(tensor)), tensor[len(tensor) // 2 :])


@pytest.mark.parametrize("shape", [(1000, 40), (3, 20)])
def test_the_writer_never_asks_for_more_than_a_piece(shape, monkeypatch, tmp_path):
    monkeypatch.setattr(safe, "PIECE", 400)
    asked = []

    def read(start, stop):
        asked.append((stop - start) * shape[1] * 4)
        return torch.zeros(stop - start, shape[1])

    save_tensors({"x": Lazy(shape, torch.float32, read)}, tmp_path / "a")
    assert max(asked) <= 400 and sum(asked) == shape[0] * shape[1] * 4


@pytest.mark.parametrize("lengths", [(7,), (3, 0, 4), (1, 1, 300, 2)])
def test_joined_rows_are_those_of_the_whole(lengths):
    parts = [torch.randn(n, 3) for n in lengths]
    whole, lazy = torch.cat(parts), joined([Lazy.of(p) for p in parts])
    assert lazy.shape == tuple(whole.shape)
    for start in range(0, len(whole), 2):
        for stop in (start, start + 1, len(whole)):
            assert torch.equal(lazy.read(start, stop), whole[start:stop])
    cut = lazy.rows(1, len(whole) - 1)
    assert torch.equal(cut.read(1, 3), whole[2:4])
    with pytest.raises(ValueError, match="cannot be joined"):
        joined([Lazy.of(torch.ones(2, 3)), Lazy.of(torch.ones(2, 4))])


@pytest.mark.parametrize("rows", [5, 256, 1000])
def test_a_drawn_tensor_is_the_same_however_it_is_read(rows):
    def lazy(key="a", seed=3):
        return Lazy.drawn((rows, 2), torch.float32, lambda g, n: torch.randn(n, 2, generator=g), key, seed)

    whole = lazy()()
    assert torch.equal(torch.cat([lazy().read(i, min(i + 37, rows)) for i in range(0, rows, 37)]), whole)
    assert not torch.equal(lazy("b")(), whole) and not torch.equal(lazy(seed=4)(), whole)
    assert len(whole.unique()) == whole.numel()  # blocks differ


def test_a_value_beyond_float16_is_named():
    kept = {"big": Lazy.of(torch.tensor([1.0, 1e6])), "inf": Lazy.of(torch.tensor([float("inf")]))}
    half = cast(kept, torch.float16)
    assert half["inf"]().isinf().all()
    with pytest.raises(UserError, match="tensor big holds 1e"):
        half["big"]()
    assert cast(kept, torch.bfloat16)["big"]().dtype == torch.bfloat16


def header(data: dict, tail: bytes = b"") -> bytes:
    text = json.dumps(data).encode()
    return struct.pack("<Q", len(text)) + text + tail


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


BROKEN = "is truncated or no safetensors file"


@pytest.mark.parametrize(
    "content, words",
    [
        (b"PK\x03\x04" + b"\0" * 50, "is a pickle, which could run code"),
        (b"\x80\x02}q\x00." + b"\0" * 50, "is a pickle, which could run code"),
        (struct.pack("<Q", 1 << 60) + b"{}", BROKEN),
        (header({"x": ONE}), BROKEN),
        (header({"x": ONE}, b"\0" * 9), BROKEN),
        (header({"x": ONE | {"shape": [3]}}, b"\0" * 8), BROKEN),
        (header({"x": ONE | {"dtype": "U16", "shape": [4]}}, b"\0" * 8), "tensor x is U16; known are F64, F32"),
        (header({"x": ONE, "y": ONE}, b"\0" * 8), BROKEN),
        (struct.pack("<Q", 4) + b"{abc", BROKEN),
        (struct.pack("<Q", 3) + b"[1]", BROKEN),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, BROKEN),
    ],
)
def test_a_broken_file_is_refused(tmp_path, content, words):
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_safetensors(path)
    assert words in str(error.value) and str(path) in str(error.value) and "fetch" in str(error.value)


def test_a_header_that_begins_like_a_pickle_is_read(tmp_path):
    """A header of 640 bytes starts with the two bytes of pickle protocol 2."""
    tensor = torch.arange(3.0)
    text = json.dumps({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}).encode().ljust(640)
    (tmp_path / "a").write_bytes(struct.pack("<Q", 640) + text + tensor.numpy().tobytes())
    assert torch.equal(read_safetensors(tmp_path / "a")["x"](), tensor)


def test_a_place_without_a_name_is_found_or_refused(monkeypatch, tmp_path):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with replacing_folder(Path("../out/.")) as folder:
        (folder / "w").write_text("w")
    assert (tmp_path / "out" / "w").read_text() == "w"
    with pytest.raises(UserError, match="/ is the root of a disk"), replacing_folder(Path("/")):
        pass


@pytest.mark.parametrize("there", [False, True])
def test_a_full_disk_leaves_nothing_half_written(there, monkeypatch, tmp_path):
    target = tmp_path / "out"
    if there:
        target.mkdir()
        (target / "old").write_text("old")

    class Full:
        def read(self, start, stop):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match="No space left on device.*free some space"), replacing_folder(target) as folder:
        save_tensors({"x": Lazy((4, 4), torch.float32, Full().read)}, folder / "w")
    assert [p.name for p in tmp_path.rglob("*")] == (["out", "old"] if there else [])
    with pytest.raises(UserError, match="needs 1000000000.00 GB"), replacing_folder(target, 10**18):
        pass
    with pytest.raises(KeyboardInterrupt), replacing_folder(target) as folder:
        (folder / "half").write_text("half")
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.rglob("*")] == (["out", "old"] if there else [])
