"""What a codec does to a device: no waiting inside a frame, full precision, whole decodes in one pass."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from omni.codec import network
from omni.codec.network import NetworkCodec, NetworkStream, Streams
from tests.codec.test_batch import codec_of
from tests.codec.test_codec import random_codes

NETWORKS = ["snac_a", "snac_b", "mimi", "mimi_replicate"]


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for a device: values read, sizes that depend on values, copies between devices."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        tensors = [x for x in (*args, out) if isinstance(x, Tensor)]
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero"):
            self.seen[name] += 1
        elif name in ("copy_", "_to_copy") and len({x.device.type for x in tensors}) > 1:
            self.seen["copy"] += 1
        return out


def test_the_count_can_fail() -> None:
    with Waits() as waits:
        torch.ones(3).to("meta")
        torch.ones(1).item()
        torch.ones(3).nonzero()
    assert waits.seen == {"copy": 1, "_local_scalar_dense": 1, "nonzero": 1}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NETWORKS)
def test_nothing_waits_while_frames_are_decoded(name: str) -> None:
    """The meta device stands for a GPU; streams that begin, that go on, and that are no neighbours."""
    codec = codec_of(name, "meta")
    streams = Streams(codec._decoder, codec.device)
    codes = torch.zeros(3, len(codec.codebook_sizes), 1, dtype=torch.long, device="meta")
    rows = [streams.open(seed) for seed in range(3)]
    with Waits() as waits:
        for _ in range(5):
            codec._pass(streams, rows, codes)
        codec._pass(streams, rows[1:], codes[1:])
    assert waits.seen == {}
    with Waits() as waits:
        codec._pass(streams, rows[::2], codes[::2])
    assert waits.seen["copy"] <= 2  # the numbers of the rows
    with Waits() as waits:
        codec._pass(streams, rows, None)
    assert waits.seen == {}
    if name.startswith("mimi"):
        assert codec._encode(torch.zeros(3 * codec.frame_samples, device="meta")).is_meta  # nothing is left on the CPU


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("chunk", [3, 32])
def test_a_whole_decode_in_few_passes_equals_the_stream(name: str, chunk: int) -> None:
    codec = codec_of(name)
    for frames in (1, 2, chunk, 40):
        codes = random_codes(codec, frames, seed=frames)
        stream = NetworkStream(codec, 4, chunk)
        whole = torch.cat([stream.push(codes), stream.finish()])
        torch.testing.assert_close(whole, codec.decode(codes, 4), rtol=0, atol=1e-5)


def test_a_device_that_is_no_cpu_decodes_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, chunks = codec_of("snac_a"), []

    class Recorded:
        def __init__(self, codec: NetworkCodec, seed: int, chunk: int) -> None:
            chunks.append(chunk)

        push = finish = lambda self, *codes: torch.empty(0)

    monkeypatch.setattr(network, "NetworkStream", Recorded)
    for device in ("cpu", "meta"):
        codec.device = torch.device(device)
        codec.decode(random_codes(codec, 5), 2)
    assert chunks == [1, 32]


def precision() -> str:
    return torch.backends.cudnn.conv.fp32_precision


def test_convolutions_are_exact_on_a_gpu_and_only_while_a_codec_computes() -> None:
    codec, before = codec_of("snac_a"), precision()
    with codec._plain():
        assert precision() == before  # a CPU has no TF32
    codec.device = torch.device("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there may be no GPU
        first_in, second_in = threading.Event(), threading.Event()

        def other() -> None:
            first_in.wait()
            with codec._plain():
                second_in.set()
                left.wait()
                seen.append(precision())

        left, seen = threading.Event(), []
        thread = threading.Thread(target=other)
        thread.start()
        with contextlib.suppress(KeyError), codec._plain():
            first_in.set()
            second_in.wait()
            assert precision() == "ieee"
            raise KeyError
        assert precision() == "ieee"  # for the other one, who is still inside
        left.set()
        thread.join()
    assert seen == ["ieee"] and precision() == before


@pytest.mark.cuda
@pytest.mark.parametrize("name", NETWORKS)
def test_on_a_gpu(name: str) -> None:
    """Streams, batches and whole decodes equal the CPU's; nothing synchronises inside a frame."""
    here, there = codec_of(name), codec_of(name, "cuda")
    lines = [random_codes(here, 9, seed=n) for n in range(3)]
    wanted = [here.decode(codes, seed) for seed, codes in enumerate(lines)]
    batch = there.batch()
    numbers = [batch.open(seed) for seed in range(3)]
    heard: list[list[Tensor]] = [[], [], []]
    for frame in torch.stack(lines).split(1, dim=2):
        for parts, sound in zip(heard, batch.push(numbers, frame), strict=True):
            assert isinstance(sound, Tensor) and sound.device.type == "cpu"
            parts.append(sound)
    for n, rest in enumerate(batch.finish(numbers)):
        assert isinstance(rest, Tensor)
        torch.testing.assert_close(torch.cat([*heard[n], rest]), wanted[n], rtol=0, atol=1e-5)
        torch.testing.assert_close(there.decode(lines[n], n).cpu(), wanted[n], rtol=0, atol=1e-5)
    streams = Streams(there._decoder, there.device)
    rows = [streams.open(seed) for seed in range(3)]
    codes = torch.stack(lines).cuda()[:, :, :1]
    there._pass(streams, rows, codes)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with there._plain():
            there._pass(streams, rows, codes)
    finally:
        torch.cuda.set_sync_debug_mode("default")
