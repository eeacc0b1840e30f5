"""Laws of a batch of streams, for every codec: each gets what its own stream gives, in any company and after any failure."""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from omni.codec.base import AudioCodec, CodecStream
from omni.codec.mimi import MimiCodec
from omni.codec.registry import load_codec
from omni.codec.snac import SnacCodec
from omni.errors import UserError
from tests.codec.mimi_toys import PLAIN
from tests.codec.test_codec import SNAC_A, SNAC_B, random_codes

REPLICATE: dict[str, Any] = PLAIN | {"pad_mode": "replicate", "use_conv_shortcut": True, "num_residual_layers": 2}


def codec_of(name: str, device: str = "cpu") -> Any:
    if name == "codec2":
        return load_codec("codec2")
    if name.startswith("mimi"):
        return MimiCodec.random(1, device, **(PLAIN if name == "mimi" else REPLICATE))
    return SnacCodec.random(1, device, **(SNAC_A if name == "snac_a" else SNAC_B))


@pytest.fixture(scope="module", params=["codec2", "snac_a", "snac_b", "mimi", "mimi_replicate"])
def codec(request: pytest.FixtureRequest) -> AudioCodec:
    return codec_of(request.param)


def sound_of(result: Tensor | Exception) -> Tensor:
    assert isinstance(result, Tensor), result
    assert result.dtype == torch.float32 and result.device.type == "cpu"
    return result


@dataclass
class Talk:
    """A stream of a schedule: all its codes, and what was heard of it so far."""

    number: int
    seed: int
    codes: Tensor
    pushed: int = 0
    heard: list[Tensor] = field(default_factory=list)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 40))])
def test_a_batch_equals_its_streams_under_any_schedule(codec: AudioCodec, seed: int) -> None:
    """Streams come, are pushed in any company and order, end and are dropped at random."""
    rng, batch = random.Random(seed), codec.batch()
    talks: list[Talk] = []
    whole, ended = 0, 0
    for turn in range(40):
        for _ in range(rng.choice([0, 0, 1, 1, 3]) if turn < 34 else 0):
            frames = rng.choice([0, 1, 2, 3, 5, 9])
            key = rng.randint(0, 99)
            talks.append(Talk(batch.open(key), key, random_codes(codec, frames, seed=rng.randint(0, 999))))
        count = rng.choice([1, 1, 1, 2, 3])
        ready = [talk for talk in talks if talk.pushed + count <= talk.codes.shape[1] and rng.random() < 0.8]
        rng.shuffle(ready)
        if ready:
            codes = torch.stack([talk.codes[:, talk.pushed : talk.pushed + count] for talk in ready])
            for talk, result in zip(ready, batch.push([talk.number for talk in ready], codes), strict=True):
                talk.heard.append(sound_of(result))
                talk.pushed += count
                assert sum(map(len, talk.heard)) == codec.exact_samples(talk.pushed)
        for talk in [talk for talk in talks if rng.random() < 0.05]:
            batch.close(talk.number)
            talks.remove(talk)
        done = [talk for talk in talks if talk.pushed == talk.codes.shape[1] or rng.random() < 0.05]
        for talk, result in zip(done, batch.finish([talk.number for talk in done]), strict=True):
            heard = torch.cat([*talk.heard, sound_of(result)])
            alone = codec.decode(talk.codes[:, : talk.pushed], talk.seed)
            torch.testing.assert_close(heard, alone, rtol=0, atol=1e-5)
            talks.remove(talk)
            whole, ended = whole + len(heard), ended + 1
        assert len(batch) == len(talks)
    assert ended > 10 and whole > 20 * codec.frame_samples


@pytest.mark.sampled(2)
def test_a_batch_of_one_is_a_stream_bit_for_bit(codec: AudioCodec) -> None:
    codes, batch = random_codes(codec, 12), codec.batch()
    for _ in range(2):  # also as the next holder of whatever the first one had
        stream = batch.open(seed=3)
        parts = [sound_of(batch.push([stream], piece[None])[0]) for piece in codes.split([1, 3, 1, 5, 2], dim=1)]
        parts.append(sound_of(batch.finish([stream])[0]))
        assert torch.equal(torch.cat(parts), codec.decode(codes, seed=3))


def test_a_stream_opened_in_inference_mode_goes_on_outside_of_it(codec: AudioCodec) -> None:
    """As where an engine opens it in one thread and decodes in another, for which the mode does not hold."""
    codes = torch.stack([torch.arange(3) % size for size in codec.codebook_sizes])[None]
    batch = codec.batch()
    with torch.inference_mode():
        numbers, alone = [batch.open(), batch.open()], codec.stream()
    sounds, alone_sound = batch.push(numbers, codes.expand(2, -1, -1)), alone.push(codes[0])
    torch.testing.assert_close(sounds, [alone_sound, alone_sound])


def test_codes_that_do_not_fit_end_their_own_stream_only(codec: AudioCodec) -> None:
    batch, lines = codec.batch(), [random_codes(codec, 6, seed=n) for n in range(4)]
    streams = [batch.open(seed=n) for n in range(4)]
    first = batch.push(streams, torch.stack([line[:, :3] for line in lines]))
    second = torch.stack([line[:, 3:] for line in lines])
    second[2, 1, 1] = wrong = codec.codebook_sizes[1]
    results = batch.push(streams, second)
    assert isinstance(results[2], UserError) and str(results[2]).startswith(f"code {wrong} in stream 1, frame 4 ")
    assert len(batch) == 3
    for n, rest in enumerate(batch.finish(streams)):
        if n == 2:
            assert isinstance(rest, UserError) and f"stream {streams[2]} is not open" in str(rest)
            continue
        heard = torch.cat([sound_of(part) for part in (first[n], results[n], rest)])
        torch.testing.assert_close(heard, codec.decode(lines[n], seed=n), rtol=0, atol=1e-5)
    assert len(batch) == 0


def test_a_closed_stream_is_a_failure_of_its_own(codec: AudioCodec) -> None:
    batch, codes = codec.batch(), random_codes(codec, 8)
    gone, here = batch.open(), batch.open()
    batch.close(gone)
    batch.close(gone)
    new = batch.open()
    assert new not in (gone, here)
    late, sound = batch.push([gone, here], codes.expand(2, -1, -1))
    assert isinstance(late, UserError) and "is not open" in str(late)
    assert len(sound_of(sound)) == codec.exact_samples(8)
    assert [len(sound_of(part)) for part in batch.finish([new])] == [0]


def test_a_call_that_is_wrong_as_a_whole_takes_nothing(codec: AudioCodec) -> None:
    batch, codes = codec.batch(), random_codes(codec, 8)
    streams = [batch.open(), batch.open()]
    both = codes.expand(2, -1, -1)
    with pytest.raises(UserError, match=rf"2 {codec.name} streams take codes \[2, codebooks, frames\], not \[1, "):
        batch.push(streams, both[:1])
    assert batch.push([], both[:0]) == [] and batch.finish([]) == []
    assert [len(sound_of(part)) for part in batch.push(streams, both[:, :, :0])] == [0, 0]
    alone = codec.decode(codes)
    for heard, rest in zip(batch.push(streams, both.int()), batch.finish(streams), strict=True):
        torch.testing.assert_close(torch.cat([sound_of(heard), sound_of(rest)]), alone, rtol=0, atol=1e-5)


class Brittle(CodecStream):
    """A stream of somebody's that fails at codes of its choice."""

    def _push(self, codes: Tensor) -> Tensor:
        if (codes == 1).any():
            raise RuntimeError("this code is one too many")
        if (codes == 2).any():
            return torch.full((8 * codes.shape[1],), float("nan"))
        return torch.zeros(8 * codes.shape[1] - (3 if (codes == 3).any() else 0))

    def _finish(self) -> Tensor:
        return self._nothing()


class Plugged(AudioCodec):
    name, sample_rate, frame_samples, codebook_sizes = "plugged", 8000, 8, (9, 9)

    def stream(self, seed: int = 0) -> CodecStream:
        return Brittle(self)

    def _encode(self, audio: Tensor) -> Tensor:
        raise NotImplementedError


def test_the_failures_of_a_plug_in_stay_where_they_are() -> None:
    batch = Plugged().batch()
    streams = [batch.open() for _ in range(4)]
    codes = torch.zeros(4, 2, 1, dtype=torch.long)
    codes[1], codes[2], codes[3] = 1, 2, 3
    good, raised, not_finite, short = batch.push(streams, codes)
    assert len(sound_of(good)) == 8 and len(sound_of(short)) == 5
    assert isinstance(raised, RuntimeError) and "one too many" in str(raised)
    assert isinstance(not_finite, UserError) and "not finite" in str(not_finite)
    assert len(batch) == 2
    good, short = batch.finish([streams[0], streams[3]])
    assert len(sound_of(good)) == 0
    assert isinstance(short, UserError) and "made 5 samples of 1 frames" in str(short)


def damaged(name: str) -> Any:
    """A codec whose code 0 of the first codebook is not a number."""
    codec = codec_of(name)
    table = codec._quantizer[0].tables[0] if name.startswith("mimi") else codec._model.quantizer.quantizers[0].codebook.weight
    table[0] = float("nan")
    return codec


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["snac_a", "snac_b", "mimi", "mimi_replicate"])
def test_what_is_not_a_number_in_one_stream_reaches_no_other(name: str) -> None:
    """Neither those of the same calls nor the next holders of its memory."""
    codec = damaged(name)
    batch, frames = codec.batch(), 30
    lines = [random_codes(codec, frames, seed=n).clamp(min=1) for n in range(3)]
    spoilt = lines[1].clone()
    spoilt[0, 2] = 0
    streams = [batch.open(seed=n) for n in range(3)]
    heard: list[list[Tensor]] = [[], [], []]
    failure, begun = None, 0
    for frame in range(frames):
        middle = spoilt[:, frame] if failure is None else lines[1][:, frame - begun]
        results = batch.push(streams, torch.stack([lines[0][:, frame], middle, lines[2][:, frame]])[:, :, None])
        if isinstance(results[1], Exception):
            failure, begun = results[1], frame + 1
            streams[1] = batch.open(seed=1)  # in the memory of the one that failed, and in the same company
            results[1], heard[1] = torch.empty(0), []
        for parts, result in zip(heard, results, strict=True):
            parts.append(sound_of(result))
    assert isinstance(failure, UserError) and "not finite" in str(failure) and 3 <= begun < frames - 5
    for n, rest in enumerate(batch.finish(streams)):
        codes = lines[n] if n != 1 else lines[1][:, : frames - begun]
        torch.testing.assert_close(torch.cat([*heard[n], sound_of(rest)]), codec.decode(codes, n), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["snac_a", "mimi"])
def test_memory_follows_the_number_of_streams(name: str) -> None:
    codec = codec_of(name)
    batch, codes = codec.batch(), random_codes(codec, 1)

    def held() -> int:
        streams = batch._streams
        assert all(cache.rows == len(streams._state) for cache in streams.caches)
        return len(streams._state)

    streams = [batch.open() for _ in range(33)]
    assert all(isinstance(part, Tensor) for part in batch.push(streams, codes.expand(33, -1, -1)))
    assert 33 <= held() <= 66
    for stream in streams[:30]:
        batch.close(stream)
    assert 3 <= held() <= 12
    batch.finish(streams)
    assert held() <= 1 and len(batch) == 0


def held_by_the_process() -> tuple[int, int, int, float]:
    """Descriptors, threads, mapped files that are deleted (private copies of a library), and memory in MB."""
    gc.collect()
    folder = Path("/proc/self")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    memory = int(status["VmRSS"].split()[0]) / 1024
    return (
        len(list((folder / "fd").iterdir())),
        int(status["Threads"]),
        (folder / "maps").read_text().count("(deleted)"),
        memory,
    )


def connect_and_leave(codec: AudioCodec, cycles: int) -> None:
    """Streams that open, say a little, and finish, are closed, fail, or are forgotten."""
    rng, batch, codes = random.Random(0), codec.batch(), random_codes(codec, 2)
    for _ in range(cycles):
        talking = [batch.open(rng.randint(0, 99)) for _ in range(rng.choice([1, 1, 1, 4]))]
        rest = codes.expand(len(talking), -1, -1)
        if rng.random() < 0.5:
            batch.push(talking, rest)
        end = rng.randint(0, 3)
        if end == 0:
            batch.finish(talking)
        elif end == 1:
            assert all(isinstance(failure, UserError) for failure in batch.push(talking, rest + 9999))
        elif end == 2:
            for stream in talking:
                batch.close(stream)
        else:
            batch = codec.batch()
            codec.stream().push(codes)
        assert len(batch) == 0


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc here")
@pytest.mark.parametrize("cycles", [30, pytest.param(10_000, marks=pytest.mark.long)])
def test_streams_that_come_and_go_leave_nothing_behind(codec: AudioCodec, cycles: int) -> None:
    connect_and_leave(codec, 30)
    before = held_by_the_process()
    connect_and_leave(codec, cycles)
    after = held_by_the_process()
    assert all(now <= then for now, then in zip(after[:3], before[:3], strict=True))
    assert after[3] <= before[3] * 1.05
