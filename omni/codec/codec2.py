"""Codec2: codes speech at 8 kHz as 25 frames a second of four codes (mode 700C) or of eight (mode 1600); has no weights.

A frame of 320 samples is 28 bits; in their order, most significant first: spectrum 9 + 9, energy 4, pitch 6
(pitch 0: unvoiced). Format: codec2 1.2, `codec2_encode_700c`. In mode 1600 it is 64 bits (`codec2_encode_1600`), cut into
codes: voicing 2 and pitch 7 | energy 5, voicing 2 | pitch 7 | energy 5, line spectrum 4 | spectrum 4 + 4 | 4 + 4 | 4 + 4 |
3 + 3 + 2. The C library comes with the wheel of `pycodec2` (LGPL-2.1). Decoded sound lags the encoded sound by about 30 ms.

The library draws the phases of unvoiced frames from one random state per process, so its decoders disturb each other and no
decoding can be repeated exactly. Here every stream loads its own copy of the library, with a fresh state: the dynamic loader
knows a library by its file, so that a copy of the file, removed as soon as it is loaded, is another library. That takes 0.8 ms
and 0.4 MB of memory. A frame takes 0.03 ms, and 0.1 around a push of one stream; a batch of 64 streams takes 0.05 ms for each
(one core of an EPYC, of which one thread decodes for more than 700 listeners). The lock of Python's interpreter is free while a
frame is decoded. A frame's samples depend on no later frame: the lookahead is 0.
"""

from __future__ import annotations

import ctypes
import functools
import os
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

from omni.codec.base import AudioCodec, CodecBatch, CodecStream
from omni.errors import PackageError, UserError


class _SymbolInfo(ctypes.Structure):
    """`Dl_info` of `dladdr(3)`."""

    _fields_ = (("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("symbol", ctypes.c_char_p), ("address", ctypes.c_void_p))


def load_private(path: str) -> ctypes.CDLL:
    """Loads a fresh copy of the shared library `path`; release it with `_release`.

    Raises UserError when the folder for temporary files cannot hold the copy.
    """
    # Deep binding: the copy calls itself even where the original was loaded into the global scope.
    mode = os.RTLD_LOCAL | os.RTLD_NOW | getattr(os, "RTLD_DEEPBIND", 0)
    copy = None
    try:
        descriptor, copy = tempfile.mkstemp(prefix="omni-", suffix=f"-{os.path.basename(path)}")
        with open(descriptor, "wb") as file:
            # Written from memory: a file that the kernel copies from the original takes ten times as long to unmap.
            file.write(_contents(Path(path)))
        return ctypes.CDLL(copy, mode=mode)
    except OSError as error:
        folder = os.path.dirname(copy) if copy else "a temporary folder"
        raise UserError(
            f"cannot load a copy of {os.path.basename(path)} from {folder} ({error}): "
            "point TMPDIR at a folder with room that allows execution"
        ) from error
    finally:
        if copy is not None:
            os.unlink(copy)


_contents = functools.cache(Path.read_bytes)


FRAME_SAMPLES = 320
NOISES = 1024  # number of different noise sequences, chosen by the seed


@dataclass(frozen=True)
class Codec2Mode:
    """Its number in codec2.h, and the bits of a frame's codes."""

    number: int
    bits: tuple[int, ...]

    @property
    def frame_bytes(self) -> int:
        return -(-sum(self.bits) // 8)

    @property
    def shifts(self) -> np.ndarray:
        """[K, 1], of each code in the big-endian word of 64 bits that a frame begins."""
        return (64 - np.cumsum(self.bits)).astype(np.uint64)[:, None]


MODES = {"codec2": Codec2Mode(8, (9, 9, 4, 6)), "codec2-1600": Codec2Mode(2, (9, 7, 7, 9, 8, 8, 8, 8))}


class Codec2Codec(AudioCodec):
    """Codec2 behind the `AudioCodec` contract, 25 frames/s: `codec2` has K = 4 streams of 512, 512, 16 and 64 codes (mode
    700C), `codec2-1600` 8 of 512, 128, 128, 512 and four times 256.

    Always computes on the CPU. May be used from any thread or worker process, and pickled. Raises PackageError
    where `pycodec2` is not installed.
    """

    sample_rate = 8000
    frame_samples = FRAME_SAMPLES
    portable = True

    def __init__(self, name: str = "codec2") -> None:
        library_path()  # so that a missing package raises here, not at the first sound
        self.name, self.mode = name, MODES[name]
        self.codebook_sizes = tuple(2**bits for bits in self.mode.bits)

    def stream(self, seed: int = 0) -> CodecStream:
        """A new decoder; `seed` modulo 1024 chooses the noise of its unvoiced frames."""
        return _Codec2Stream(self, seed)

    def batch(self) -> CodecBatch:
        return _Codec2Batch(self)

    def _encode(self, audio: Tensor) -> Tensor:
        pcm = np.zeros((self.frames(audio.numel()), FRAME_SAMPLES), dtype=np.int16)
        samples = (audio * 32768).round().clamp(-32768, 32767).to(torch.int16)
        pcm.reshape(-1)[: audio.numel()] = samples.numpy()
        packed = np.zeros((len(pcm), self.mode.frame_bytes), dtype=np.uint8)
        library = _declare(ctypes.CDLL(library_path()))  # shared: encoding draws no random numbers
        state = library.codec2_create(self.mode.number)
        try:
            for frame in range(len(pcm)):
                library.codec2_encode(state, packed[frame].ctypes.data, pcm[frame].ctypes.data)
        finally:
            library.codec2_destroy(state)
        return unpack(packed, self.mode)


class _Codec2Stream(CodecStream):
    """One decoder, in its own copy of the library."""

    def __init__(self, codec: Codec2Codec, seed: int) -> None:
        super().__init__(codec)
        self._library = _declare(load_private(library_path()))
        self.mode = codec.mode
        self._state = self._library.codec2_create(self.mode.number)
        self._call = ctypes.cast(self._library.codec2_decode, ctypes.c_void_p).value, self._state  # addresses
        self._release = weakref.finalize(self, _release, self._library, self._state)
        for _ in range(seed % NOISES):
            self._library.codec2_rand()

    def _push(self, codes: Tensor) -> Tensor:
        return torch.from_numpy(_decoded([self], codes)[0])

    def _finish(self) -> Tensor:
        self._release()
        return self._nothing()


class _Codec2Batch(CodecBatch):
    """Streams whose frames are packed and converted together."""

    def _decode(self, states: Sequence[Any], codes: Tensor | None) -> list[Tensor | Exception]:
        if codes is None:
            return [stream._nothing() for stream in states]
        for stream in states:
            stream.pushed += codes.shape[2]
        # NumPy copies: for each of PyTorch's the thread would let another one run, and wait for it.
        return [torch.from_numpy(sound.copy()) for sound in _decoded(states, codes.transpose(0, 1).flatten(1))]

    def _stop(self, state: Any) -> None:
        state._release()


def _decoded(streams: Sequence[_Codec2Stream], codes: Tensor) -> np.ndarray:
    """Sounds `[N, f * FRAME_SAMPLES]` (float32) of N streams; codes `[K, N * f]`, one stream after another."""
    packed = pack(codes, streams[0].mode)
    pcm = np.empty((len(streams), len(packed) // len(streams), FRAME_SAMPLES), dtype=np.int16)
    # Addresses are counted up here: those of slices take NumPy longer than the library takes for a frame.
    calls = np.array([stream._call for stream in streams])
    _decode_all(calls, pcm.shape[1], packed.shape[1], packed.ctypes.data, pcm.ctypes.data)
    sounds: np.ndarray = pcm.reshape(len(streams), -1).astype(np.float32) / np.float32(32768)
    return sounds


@intrinsic  # type: ignore[untyped-decorator]
def _call(context: Any, function: Any, state: Any, target: Any, source: Any) -> Any:
    """Calls the C function at an address, which takes three pointers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        pointer = builder.inttoptr(arguments[0], ir.FunctionType(ir.VoidType(), [word] * 3).as_pointer())
        builder.call(pointer, arguments[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _decode_all(calls: Any, frames: Any, size: Any, source: Any, target: Any) -> None:
    """Decode frames of `size` bytes of each of N streams, whose functions and states `calls` [N, 2] are."""
    for n in range(len(calls)):
        for _ in range(frames):
            _call(calls[n, 0], calls[n, 1], target, source)  # type: ignore[call-arg]
            source += size
            target += 2 * FRAME_SAMPLES


def pack(codes: Tensor, mode: Codec2Mode) -> np.ndarray:
    """The library's bytes `[F, B]` of codes `[K, F]`."""
    words = np.bitwise_or.reduce(codes.numpy().astype(np.uint64) << mode.shifts, axis=0)
    return np.ascontiguousarray(words.astype(">u8").view(np.uint8).reshape(-1, 8)[:, : mode.frame_bytes])


def unpack(packed: np.ndarray, mode: Codec2Mode) -> Tensor:
    """Codes `[K, F]` (int64) of the library's bytes `[F, B]`."""
    words = np.pad(packed, ((0, 0), (0, 8 - mode.frame_bytes))).reshape(-1).view(">u8").astype(np.uint64)
    masks = np.array([2**bits - 1 for bits in mode.bits], dtype=np.uint64)[:, None]
    return torch.from_numpy(((words >> mode.shifts) & masks).astype(np.int64))


@functools.cache
def library_path() -> str:
    """Path of the codec2 library that `pycodec2` uses: the loader finds one bundled in its wheel and one of the system alike.

    Raises PackageError without the package, and UserError where it reaches no such library, or the system is no POSIX one.
    """
    try:
        from pycodec2 import pycodec2
    except ImportError as error:
        raise PackageError('codec2 needs the package pycodec2: pip install "omni-speech[nano]"') from error
    if os.name != "posix":
        raise UserError("private copies of the codec2 library need Linux or macOS: run there")
    info, function = _SymbolInfo(), getattr(ctypes.CDLL(pycodec2.__file__), "codec2_create", None)
    if function is not None:
        ctypes.CDLL(None).dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(info))
    if info.file is None:
        raise UserError(f"{pycodec2.__file__} reaches no function codec2_create: reinstall pycodec2")
    return os.fsdecode(info.file)


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Gives the functions used here their C signatures: pointers must not be cut to 32 bits."""
    library.codec2_create.argtypes, library.codec2_create.restype = [ctypes.c_int], ctypes.c_void_p
    library.codec2_destroy.argtypes, library.codec2_destroy.restype = [ctypes.c_void_p], None
    for function in (library.codec2_encode, library.codec2_decode):
        function.argtypes, function.restype = [ctypes.c_void_p] * 3, None
    return library


def _release(library: ctypes.CDLL, state: int) -> None:
    """Frees a decoder and unmaps its private library; nothing of either may be used afterwards."""
    library.codec2_destroy(state)
    ctypes.CDLL(None).dlclose(ctypes.c_void_p(library._handle))
