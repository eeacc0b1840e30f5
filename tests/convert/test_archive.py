"""Files in the format of `torch.save`, written piece by piece: PyTorch reads them, mapped and not, and nothing stands whole."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from omni.checkpoint import tensors as safe
from omni.convert import mini_omni
from omni.convert.lazy import FLOATS, Lazy
from omni.convert.mini_omni import ALIGNED, write_archive
from tests.convert.mini_omni_toys import save, settings_of, state_of

SHAPES = ((5, 3), (1,), (), (0, 4), (2, 3, 4), (70, 11))


def made() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    kinds = [(shape, dtype) for shape in SHAPES for dtype in FLOATS]
    return {f"layer.{i}": torch.randn(shape, generator=generator).to(dtype) for i, (shape, dtype) in enumerate(kinds)}


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("large", [False, True])  # as parts and places beyond 2 GiB are written down
def test_pytorch_reads_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mapped: bool, large: bool) -> None:
    monkeypatch.setattr(safe, "PIECE", 100)
    if large:
        monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 1000)
    state, path, told = made(), tmp_path / "a.pt", []
    with path.open("wb") as handle:
        lazy = {name: Lazy.of(tensor) for name, tensor in state.items()}
        stamp = write_archive(handle, lazy, lambda held: {"dims": {"n": 3}, "state": held}, told.append)
    data = path.read_bytes()
    assert (len(data), zlib.crc32(data)) == (stamp.bytes, stamp.crc32) and sum(told) == len(data)
    found = torch.load(path, weights_only=True, mmap=mapped)
    assert found["dims"] == {"n": 3} and list(found["state"]) == list(state)
    for name, tensor in found["state"].items():
        assert tensor.dtype == state[name].dtype and torch.equal(tensor, state[name]) and tensor.is_contiguous()
        assert not mapped or not tensor.numel() or tensor.data_ptr() % ALIGNED == 0
    with zipfile.ZipFile(path) as archive:  # every part's checksum holds, and none is compressed
        assert archive.testzip() is None and {part.compress_type for part in archive.infolist()} == {zipfile.ZIP_STORED}


def test_tensors_that_are_not_finite_are_named() -> None:
    state = made()
    state["layer.15"][69, 3] = float("nan")
    lazy = {name: Lazy.of(tensor) for name, tensor in state.items()}
    assert write_archive(io.BytesIO(), lazy, lambda held: held, lambda count: None).odd == ("layer.15",)


def test_the_parts_are_those_of_torch_save() -> None:
    state, ours, theirs = made(), io.BytesIO(), io.BytesIO()
    write_archive(ours, {name: Lazy.of(tensor) for name, tensor in state.items()}, lambda held: held, lambda count: None)
    torch.save(state, theirs)
    a, b = zipfile.ZipFile(ours), zipfile.ZipFile(theirs)
    names = {name.partition("/")[2] for name in b.namelist()} - {
        ".format_version",
        ".storage_alignment",
        ".data/serialization_id",
    }
    assert {name.partition("/")[2] for name in a.namelist()} == names
    for name in names - {"data.pkl"}:
        assert a.read(f"archive/{name}") == b.read(f"{b.namelist()[0].partition('/')[0]}/{name}"), name


class Largest(TorchDispatchMode):
    """Bytes of the largest memory that any operation has allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                held = tensor.untyped_storage()
                if held.data_ptr() not in given:
                    self.bytes = max(self.bytes, held.nbytes())
        return out


def test_no_table_of_a_mini_omni_is_held_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda handle: None)
    monkeypatch.setattr(safe, "PIECE", 1 << 16)
    settings = settings_of("released")
    source = mini_omni.read(save(tmp_path / "theirs", settings, state_of(settings)))
    with Largest() as largest:
        mini_omni.write(source, tmp_path / "out")
    assert 0 < largest.bytes <= 1 << 16
    again = torch.load(tmp_path / "out" / "lit_model.pth", weights_only=True)
    assert all(torch.equal(again[name], tensor) for name, tensor in state_of(settings).items())
