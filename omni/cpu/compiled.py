"""A decoder's step on a CPU, compiled by numba for this processor: in float32, and what int8 (`compiled_int8`) has in common.

A step costs its calls more than its work: it is hundreds of PyTorch's operations, or thousands, and after each the thread asks
for the interpreter's lock again, which the threads beside it hold. Here a small model's blocks are one call, without the lock.
A row attends to its own keys alone, however many others of its step have, and a row that rests costs nothing. What a row
gives does not depend on the other rows.

numba compiles for some seconds once, and keeps what it made beside its file, or in the user's cache folder.

Dimensions: B rows of a step, K streams, W width, H heads, G key/value heads, D size of a head, F width of the feed-forward
network, R rows of the cache, S its slots of a row with the spare one, V slots that are read.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.extending import intrinsic

LOG = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

_EXACT, _FAST = {"nsz", "contract"}, {"nsz", "arcp", "contract", "afn", "reassoc"}  # what is not finite stays so in both
_ZERO, _ONE = np.float32(0), np.float32(1)
_CODE = zlib.crc32(Path(__file__).read_bytes())


def compiled_function(function: F, nogil: bool = True, sums: bool = False) -> F:
    """Have a function compiled at its first call with numbers of some types, and kept; without the lock where `nogil`.

    Args:
        sums: its sums may be taken in any order. An innermost loop of such a function must not write an array: where what is
            written lies next to what is read, LLVM has the loop take one number at a time, in another order than elsewhere.
            For the same reason no function writes a number that is more than a product added to another number.
    """
    made: Any = njit(fastmath=_FAST if sums else _EXACT, nogil=nogil, error_model="numpy")(function)
    with suppress(RuntimeError):  # no folder can be written
        made._cache = KeptFunctions(function)
    return made  # type: ignore[no-any-return]


class KeptFunctions(FunctionCache):  # type: ignore[misc]
    """numba's cache of a function on disk. A damaged file is logged and made again; numba raises pickle's error each time."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self.function = function.__name__

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        """Also of this file's content: numba asks whether a function's own has changed, and not those of what it calls."""
        return super()._index_key(sig, codegen), _CODE

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:
            text = "%s is compiled again: what is kept of it in %s is damaged (%s: %s)"
            LOG.warning(text, self.function, self.cache_path, type(error).__name__, error)
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            LOG.warning("%s cannot be kept compiled in %s: %s", self.function, self.cache_path, error)


@cache
def compiled_for_threads(function: Callable[[Any], None]) -> Any:
    """A function of an address, compiled now and kept; `omni.utils.hardware.in_threads` takes its `address`."""
    made: Any = CFunc(function, ((types.CPointer(types.int64),), types.void), {}, {})
    with suppress(RuntimeError):  # no folder can be written
        made._cache = KeptFunctions(function)
    made.compile()
    return made


compiled_sums = partial(compiled_function, sums=True)
_brief = partial(compiled_function, nogil=False)
"""For what ends before another thread has woken up: where it took the lock, this one would wait for it."""


@compiled_function
def _copy(source: Any, target: Any) -> None:
    """Write numbers [K], which `target[:] = source` takes seconds more to compile."""
    for k in range(len(target)):
        target[k] = source[k]


@compiled_function
def clear(target: Any) -> None:
    for k in range(len(target)):
        target[k] = _ZERO


# --- before and after the blocks --------------------------------------------------------------------------------------


@_brief
def embed(tokens: Any, offsets: Any, audio: Any, text: Any, scale: Any, out: Any) -> None:
    """Sum the tables' rows of tokens [B, K], the last of which is of text, times `scale`, to `out` [B, W]."""
    for b in range(len(tokens)):
        here = out[b]
        _copy(text[tokens[b, len(offsets)]], here)
        for k in range(len(offsets)):
            more = audio[tokens[b, k] + offsets[k]]
            for w in range(len(here)):
                here[w] += more[w]
        for w in range(len(here)):
            here[w] *= scale


@_brief
def place(input_pos: Any, rows: Any, positions: Any, ring: Any, window: Any, writes: Any, mask: Any) -> None:
    """Note where rows are fed among the cache's positions [R, S], as `KVCache.begin_forward` does.

    Args:
        input_pos: [B], -1 for rows that rest; rows: of the cache, [B].
        window: of the attention, 0 for all.
        writes: the slot of each among all, [B]; mask: added to its scores, [B, V], 0 or minus infinity; both are written.
    """
    slots = positions.shape[1] - 1
    for b in range(len(input_pos)):
        now = input_pos[b]
        slot = slots if now < 0 else now % slots if ring else now
        positions[rows[b], slot] = now
        writes[b] = rows[b] * (slots + 1) + slot
    for b in range(len(input_pos)):
        now, held, shown = input_pos[b], positions[rows[b]], mask[b]
        for s in range(len(shown)):
            seen = (held[s] >= 0) & (held[s] <= now) & ((window == 0) | (held[s] > now - window))
            shown[s] = _ZERO if seen else -np.inf


@_brief
def rope_cos_sin(input_pos: Any, frequencies: Any, cos: Any, sin: Any) -> None:
    """Write cos and signed sin [B, D] of positions [B] (`omni.model.blocks.rope_table`)."""
    half = len(frequencies)
    for b in range(len(input_pos)):
        position = np.float32(max(input_pos[b], 0))
        for d in range(half):
            angle = position * frequencies[d]
            cos[b, d] = cos[b, half + d] = np.cos(angle)
            sin[b, half + d] = np.sin(angle)
            sin[b, d] = -sin[b, half + d]


@_brief
def norm_rows(x: Any, weight: Any, eps: Any, out: Any) -> None:
    """RMSNorm of the rows of x [B, W]."""
    for b in range(len(x)):
        _norm(x[b], weight, eps, out[b])


@_brief
def broken(hidden: Any, logits: Any, out: Any) -> None:
    """Note which rows have logits [B, N] that are not all finite numbers, or a hidden state [B, W] that is zero throughout."""
    limit = np.int32(0x7F800000)
    for b in range(len(hidden)):
        pattern, state, most, written = logits[b].view(np.int32), hidden[b], np.int32(0), False
        for n in range(len(pattern)):
            most = max(most, pattern[n] & np.int32(0x7FFFFFFF))
        for w in range(len(state)):
            written |= state[w] != 0
        out[b] = most >= limit or not written


@_brief
def push(
    rows: Any, rests: Any, sampled: Any, nonfinite: Any, step: Any, text_active: Any, audio_active: Any, text_ended: Any,
    audio_end: Any, history: Any, done: Any, ends: Any, pads: Any, delays: Any, sizes: Any, padded: Any,
    column: Any, position: Any, packed: Any,
) -> None:  # fmt: skip
    """`omni.layout.Cursor.push` and what follows it in a step, in place.

    Args:
        rows: of the state, [B]; those that rest (`rests` [B], or none) keep theirs.
        sampled: [B, K]; nonfinite: whether the logits of audio and of text are broken, [2, B].
        step ... done: of the cursor; ends, pads, delays, sizes: of its layout, [K]; padded: whether it fills with pad.
        column, position: fed next, [R, K] and [R]; packed: the results, [R, K + A + 7].
    """
    streams, depth = len(delays), history.shape[2]
    a, last = streams - 1, 0
    for k in range(a):
        last = k if delays[k] > delays[last] else last
    deepest = delays[last]
    for i in range(len(rows)):
        if len(rests) and rests[i]:
            continue
        r = rows[i]
        now, live, limit, out = step[r], not done[r], audio_end[r], packed[r]
        speaks, newest = audio_active[r] and live, now - deepest
        writing = text_active[r] and live and not text_ended[r]
        broken = (speaks and newest <= limit and nonfinite[0, i]) or (writing and nonfinite[1, i])
        for k in range(a):
            counts = now >= delays[k] if padded else k == last and now > 0
            if speaks and counts and sampled[i, k] == ends[k]:
                limit = min(limit, now - delays[k])
        sounds = speaks and 0 <= newest < limit
        for k in range(a):
            code, frame = sampled[i, k], now - delays[k]
            if padded and frame == limit:
                code = ends[k]
            if not speaks or (padded and (frame < 0 or frame > limit)):
                code = pads[k]
            for d in range(depth - 1):
                history[r, k, d] = history[r, k, d + 1]
            history[r, k, depth - 1] = code
            column[r, k] = out[k] = code
            out[streams + k] = history[r, k, delays[k] - deepest + depth - 1]
            sounds = sounds and out[streams + k] < sizes[k]
        on = writing and now >= delays[a]
        text = sampled[i, a] if on else pads[a]
        over = on and text == ends[a]
        text_ended[r] = text_ended[r] or over
        audio_done, text_done = not audio_active[r] or newest >= limit, not text_active[r] or text_ended[r]
        if not padded:  # mini-omni stops when the last audio stream has ended, even if the text has not
            text_done = text_done or audio_active[r]
        done[r] = done[r] or (audio_done and text_done)
        column[r, a] = out[a] = text
        step[r], audio_end[r] = now + 1, limit
        position[r] = -1 if done[r] else position[r] + 1
        flags = out[streams + a :]
        flags[0], flags[1], flags[2], flags[3] = sounds, text, on and not over and text < sizes[a], done[r]
        flags[4] = text_active[r] and not text_ended[r] and not done[r]
        flags[5] = audio_active[r] and not done[r] and newest + 1 <= limit
        flags[6] = broken


def pointer_to(number_type: Any) -> Any:
    """An intrinsic that gives the pointer to numbers of a type at an address."""

    def pointer(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(types.CPointer(number_type)))

        return types.CPointer(number_type)(types.int64), generate

    return intrinsic(pointer)


floats_at, integers_at = pointer_to(types.float32), pointer_to(types.int64)


def _add(context: Any, number: Any, more: Any) -> Any:
    """Add to a number that other threads add to as well, and return what it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", arguments[0], arguments[1], "monotonic")

    return types.int64(types.CPointer(types.int64), types.int64), generate


take: Any = intrinsic(_add)
"""Adds a number to the first that a thread's address points to, and returns what that was: the next part of their work."""


# --- blocks -----------------------------------------------------------------------------------------------------------


@compiled_sums
def product(x: Any, weight: Any, out: Any) -> None:
    """Write the products [B, N] of x [B, K] and a weight [N, K]; four rows and three outputs at a time, whose sums fit into the
    sixteen registers of AVX2."""
    rows, outputs, inputs = x.shape[0], weight.shape[0], x.shape[1]
    n = 0
    while n + 2 < outputs:
        w0, w1, w2 = weight[n], weight[n + 1], weight[n + 2]
        b = 0
        while b + 3 < rows:
            x0, x1, x2, x3 = x[b], x[b + 1], x[b + 2], x[b + 3]
            a00 = a01 = a02 = a10 = a11 = a12 = a20 = a21 = a22 = a30 = a31 = a32 = _ZERO
            for k in range(inputs):
                a00 += x0[k] * w0[k]
                a01 += x0[k] * w1[k]
                a02 += x0[k] * w2[k]
                a10 += x1[k] * w0[k]
                a11 += x1[k] * w1[k]
                a12 += x1[k] * w2[k]
                a20 += x2[k] * w0[k]
                a21 += x2[k] * w1[k]
                a22 += x2[k] * w2[k]
                a30 += x3[k] * w0[k]
                a31 += x3[k] * w1[k]
                a32 += x3[k] * w2[k]
            out[b, n], out[b, n + 1], out[b, n + 2] = a00, a01, a02
            out[b + 1, n], out[b + 1, n + 1], out[b + 1, n + 2] = a10, a11, a12
            out[b + 2, n], out[b + 2, n + 1], out[b + 2, n + 2] = a20, a21, a22
            out[b + 3, n], out[b + 3, n + 1], out[b + 3, n + 2] = a30, a31, a32
            b += 4
        while b < rows:
            x0 = x[b]
            a00 = a01 = a02 = _ZERO
            for k in range(inputs):
                a00 += x0[k] * w0[k]
                a01 += x0[k] * w1[k]
                a02 += x0[k] * w2[k]
            out[b, n], out[b, n + 1], out[b, n + 2] = a00, a01, a02
            b += 1
        n += 3
    for last in range(n, outputs):
        w0 = weight[last]
        for b in range(rows):
            x0 = x[b]
            a00 = _ZERO
            for k in range(inputs):
                a00 += x0[k] * w0[k]
            out[b, last] = a00


@_brief
def logits(x: Any, weight: Any, out: Any) -> None:
    """The products of a small head, which are done before another thread has had its turn."""
    product(x, weight, out)


@_brief
def likeliest(values: Any, starts: Any, counts: Any, out: Any) -> None:
    """Write the first of the largest of `counts` [N] logits from `starts` [N] on, of logits [B, V], to `out` [B, N]."""
    for b in range(len(values)):
        row = values[b]
        for n in range(len(starts)):
            here = row[starts[n] : starts[n] + counts[n]]
            best = 0
            for v in range(1, len(here)):
                if here[v] > here[best]:
                    best = v
            out[b, n] = best


@compiled_sums
def _sum(x: Any, count: Any) -> Any:
    total = _ZERO
    for k in range(count):
        total += x[k]
    return total


@compiled_sums
def _squares(x: Any) -> Any:
    total = _ZERO
    for k in range(len(x)):
        total += x[k] * x[k]
    return total


@compiled_function
def norm_factor(x: Any, eps: Any) -> Any:
    """What RMSNorm multiplies x [K] by."""
    return _ONE / np.sqrt(_squares(x) / np.float32(len(x)) + eps)


@compiled_function
def _norm(x: Any, weight: Any, eps: Any, out: Any) -> None:
    """RMSNorm of x [K]."""
    factor = norm_factor(x, eps)
    for k in range(len(weight)):
        out[k] = x[k] * factor * weight[k]


@compiled_function
def _exp(x: Any, count: Any, bits: Any, powers: Any) -> None:
    """e to the first `count` numbers of x, in place, to 2e-7; 0 below 2^-126. `powers` is the memory of `bits` as float32.

    2^k is written as a number's exponent; 2^f for f in [0, 1) is a polynomial, fitted for the least largest relative error.
    """
    for s in range(count):
        t = min(max(x[s] * np.float32(1.442695041), np.float32(-127)), np.float32(127))
        k = np.floor(t)
        f = t - k
        bits[s] = (np.int32(k) + np.int32(127)) << np.int32(23)
        p = np.float32(1.8671301e-3) * f + np.float32(9.0170302e-3)
        p = p * f + np.float32(5.5799913e-2)
        p = p * f + np.float32(2.4016445e-1)
        p = p * f + np.float32(6.9315131e-1)
        x[s] = p * f + _ONE
    for s in range(count):
        x[s] *= powers[s]


@compiled_function
def rotate_and_keep(
    t: Any, heads: Any, row: Any, slot: Any, cos: Any, sin: Any, eps: Any, q_norm: Any, k_norm: Any, keys: Any, values: Any
) -> None:
    """Norm and rotate the queries and keys among the heads t [H + 2 G, D] of a row, and write keys and values to its slot."""
    kv_heads, size = keys.shape[2], keys.shape[3]
    half, held = size // 2, np.empty(size, np.float32)
    for h in range(heads + kv_heads):
        here = t[h]
        if len(q_norm):
            _norm(here, q_norm if h < heads else k_norm, eps, held)
        else:
            _copy(here, held)
        for d in range(size):
            here[d] = held[d] * cos[d]
        for d in range(half):
            here[d] += held[d + half] * sin[d]
            here[d + half] += held[d] * sin[d + half]
    for g in range(kv_heads):
        _copy(t[heads + g], keys[row, slot, g])
        _copy(t[heads + kv_heads + g], values[row, slot, g])


@compiled_function
def _softmax(score: Any, count: Any, scale: Any, mask: Any, bits: Any, powers: Any) -> None:
    """Softmax of the first `count` scores times `scale`, with the mask added, in place."""
    for s in range(count):
        score[s] = score[s] * scale + mask[s]
    most = score[0]
    for s in range(count):
        most = max(most, score[s])
    for s in range(count):
        score[s] -= most
    _exp(score, count, bits, powers)
    total = _ONE / _sum(score, count)
    for s in range(count):
        score[s] *= total


LANES = 32
"""Numbers of values that are summed together: two vectors of AVX-512, or four of AVX2."""


def _weighted_sums(context: Any, p: Any, p_step: Any, v: Any, v_step: Any, count: Any, out: Any) -> Any:
    """Sums of vectors of 32 numbers by four weights of each, over s: `out[h] = sum of p[h, s] v[s]`, [4, 32].

    Its arguments: the address of p and the numbers between two h, the same of v and s; how many s there are; the address of
    the sums. They stay in registers, which loops of numba write to memory each time (8 rows, 256 keys: twice the time).
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        float_type, wide, int64 = ir.FloatType(), ir.VectorType(ir.FloatType(), 16), ir.IntType(64)
        same, zeros = ir.Constant(ir.VectorType(ir.IntType(32), 16), [0] * 16), ir.Constant(wide, None)
        fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(wide, [wide] * 3), "llvm.fma.v16f32")
        held = [[cgutils.alloca_once_value(builder, zeros) for _ in range(2)] for _ in range(4)]
        p, v = (builder.inttoptr(arguments[i], float_type.as_pointer()) for i in (0, 2))

        def vectors(pointer: Any, count: int) -> list[Any]:
            first = builder.bitcast(pointer, wide.as_pointer())
            return [builder.gep(first, [int64(n)]) for n in range(count)]

        with cgutils.for_range_slice(builder, int64(0), arguments[4], int64(1)) as (s, _):
            two = [builder.load(part, align=4) for part in vectors(builder.gep(v, [builder.mul(s, arguments[3])]), 2)]
            for h in range(4):
                at = builder.add(s, builder.mul(arguments[1], int64(h)))
                number = builder.insert_element(zeros, builder.load(builder.gep(p, [at])), ir.IntType(32)(0))
                every = builder.shuffle_vector(number, zeros, same)
                for sum_, lanes in zip(held[h], two, strict=True):
                    builder.store(builder.call(fma, [lanes, every, builder.load(sum_)]), sum_)
        targets = vectors(builder.inttoptr(arguments[5], float_type.as_pointer()), 8)
        for target, sum_ in zip(targets, [sum_ for row in held for sum_ in row], strict=True):
            builder.store(builder.load(sum_), target, align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


_weigh: Any = intrinsic(_weighted_sums)


@compiled_sums
def _scores(t: Any, first: Any, number: Any, keys: Any, row: Any, g: Any, count: Any, scores: Any) -> None:
    """Products of the queries `first` and so many more of t [.., D] and the keys g of `count` slots of a row."""
    size, s = keys.shape[3], 0
    while s + 3 < count:
        k0, k1, k2, k3 = keys[row, s, g], keys[row, s + 1, g], keys[row, s + 2, g], keys[row, s + 3, g]
        for h in range(number):
            query, score = t[first + h], scores[h]
            a0 = a1 = a2 = a3 = _ZERO
            for d in range(size):
                a0 += query[d] * k0[d]
                a1 += query[d] * k1[d]
                a2 += query[d] * k2[d]
                a3 += query[d] * k3[d]
            score[s], score[s + 1], score[s + 2], score[s + 3] = a0, a1, a2, a3
        s += 4
    for last in range(s, count):
        k0 = keys[row, last, g]
        for h in range(number):
            query = t[first + h]
            a0 = _ZERO
            for d in range(size):
                a0 += query[d] * k0[d]
            scores[h, last] = a0


@compiled_function
def _attend(
    t: Any, keys: Any, values: Any, row: Any, g: Any, count: Any, mask: Any, scores: Any, bits: Any, powers: Any, out: Any
) -> None:
    """Attention [H, D] of the queries that have the keys g, of the first heads of t, over the first `count` slots of their
    row of the cache."""
    kv_heads, size = keys.shape[2], keys.shape[3]
    group, scale = out.shape[0] // kv_heads, _ONE / np.sqrt(np.float32(size))
    _scores(t, g * group, group, keys, row, g, count, scores)
    for h in range(group):
        _softmax(scores[h], count, scale, mask, bits, powers)
    sums, whole = np.empty((4, LANES), np.float32), size // LANES * LANES
    for d in range(0, whole, LANES):
        at = values[row, 0, g, d:].ctypes.data
        for first in range(0, group, 4):  # beyond the last they are any numbers
            _weigh(scores[first].ctypes.data, scores.shape[1], at, kv_heads * size, count, sums.ctypes.data)
            for h in range(first, min(first + 4, group)):
                _copy(sums[h - first], out[g * group + h, d : d + LANES])
    for h in range(group if whole < size else 0):
        here = out[g * group + h, whole:]
        clear(here)
        for s in range(count):
            p, v = scores[h, s], values[row, s, g, whole:]
            for d in range(len(here)):
                here[d] += p * v[d]


@compiled_function
def attend_all(
    taken: Any, wide: Any, active: Any, writes: Any, ring: Any, heads: Any, keys: Any, values: Any, mask: Any, out: Any
) -> None:
    """Attention [N, H D] of the queries in `wide` [N, (H + 2 G) D] of the rows `active` [N], whose keys and values are kept.

    Threads share it by parts: of a row, the queries that have one head of keys. `taken` points to the number of parts that
    were taken.
    """
    slots, kv_heads, size, rows = keys.shape[1], keys.shape[2], keys.shape[3], len(active)
    seen = mask.shape[1]
    scores, bits = np.empty((heads // kv_heads + 3, seen), np.float32), np.empty(seen, np.int32)
    powers = bits.view(np.float32)
    part = take(taken, 1)
    while part < rows * kv_heads:
        i, g = part // kv_heads, part % kv_heads
        b = active[i]
        row, newest = writes[b] // slots, writes[b] % slots
        t, here = wide[i].reshape(heads + 2 * kv_heads, size), out[i].reshape(heads, size)
        _attend(t, keys, values, row, g, seen if ring else newest + 1, mask[b], scores, bits, powers, here)
        part = take(taken, 1)


@compiled_function
def active_of(writes: Any, slots: Any) -> Any:
    """Indices of `writes` that are no spare slots."""
    active, count = np.empty(len(writes), np.int64), 0
    for b in range(len(writes)):
        if writes[b] % slots != slots - 1:
            active[count] = b
            count += 1
    return active[:count]


@compiled_function
def swiglu(gate: Any, up: Any, factor: Any, out: Any, bits: Any, powers: Any) -> None:
    """silu(gate * factor) * up * factor, [F]."""
    for k in range(len(gate)):
        out[k] = -gate[k] * factor
    _exp(out, len(gate), bits, powers)
    for k in range(len(gate)):
        out[k] = gate[k] * factor / (_ONE + out[k]) * (up[k] * factor)


@compiled_function
def block(
    x: Any, writes: Any, ring: Any, mask: Any, cos: Any, sin: Any, eps: Any, norm: Any, qkv: Any, bias: Any, q_norm: Any,
    k_norm: Any, out: Any, mlp_norm: Any, gate_up: Any, down: Any, keys: Any, values: Any,
) -> None:  # fmt: skip
    """Take x [B, W] float32 through a block, in place; what rests stays as it is.

    Args:
        writes: slot of each row among all of the cache's, [B]; the spare ones are of rows that rest.
        ring: whether slots are taken in turn, and each row reads all of them.
        mask: is added to the scores, [B, V].
        cos, sin: [B, D], signed (`omni.model.blocks.rope_table`).
        qkv, bias: weights [(H + 2 G) D, W] and their biases, or none; q_norm, k_norm: [D], or none.
        out, gate_up, down: weights [W, H D], [2 F, W], [W, F].
        keys, values: [R, S, G, D].
    """
    slots, kv_heads, size = keys.shape[1], keys.shape[2], keys.shape[3]
    width, heads, inner = x.shape[1], out.shape[1] // size, down.shape[1]
    active = active_of(writes, slots)
    rows = len(active)
    held, normed = np.empty((rows, width), np.float32), np.empty((rows, width), np.float32)
    wide = np.empty((rows, len(qkv)), np.float32)
    y, bits = np.empty((rows, heads * size), np.float32), np.empty(inner, np.int32)
    powers = bits.view(np.float32)

    for i in range(rows):
        _copy(x[active[i]], held[i])
        _norm(held[i], norm, eps, normed[i])
    product(normed, qkv, wide)
    for i in range(rows):
        b, qkv_row = active[i], wide[i]
        for k in range(len(bias)):
            qkv_row[k] += bias[k]
        t, row, slot = qkv_row.reshape(heads + 2 * kv_heads, size), writes[b] // slots, writes[b] % slots
        rotate_and_keep(t, heads, row, slot, cos[b], sin[b], eps, q_norm, k_norm, keys, values)
    taken = np.zeros(1, np.int64)
    attend_all(integers_at(taken.ctypes.data), wide, active, writes, ring, heads, keys, values, mask, y)
    taken[0] = 0  # numba frees an array after its last use; its address is none
    product(y, out, normed)
    for i in range(rows):
        old, more = held[i], normed[i]
        for k in range(width):
            old[k] += more[k]
        _norm(held[i], mlp_norm, eps, normed[i])
    both, gated = np.empty((rows, 2 * inner), np.float32), np.empty((rows, inner), np.float32)
    product(normed, gate_up, both)
    for i in range(rows):
        swiglu(both[i, :inner], both[i, inner:], _ONE, gated[i], bits, powers)
    product(gated, down, normed)
    for i in range(rows):
        here, old, more = x[active[i]], held[i], normed[i]
        for k in range(width):
            here[k] = old[k] + more[k]


@compiled_function
def blocks(
    x: Any, writes: Any, ring: Any, mask: Any, cos: Any, sin: Any, eps: Any, addresses: Any, biased: Any, normed: Any,
    inner: Any, rows: Any, slots: Any, heads: Any, kv_heads: Any,
) -> None:  # fmt: skip
    """Take x [B, W] through several blocks of one shape, as `block` does, in one call: the lock is asked for once.

    Args:
        addresses: of the arguments of `block` from `norm` on, for each of N blocks, [N, 11].
        biased, normed: whether q, k and v have biases, and queries and keys norms; else their addresses are not read.
        inner: F; rows, slots: of the cache, R and S.
    """
    width, size = x.shape[1], cos.shape[1]
    every = (heads + 2 * kv_heads) * size
    bias, norms = every if biased else 0, size if normed else 0
    for n in range(len(addresses)):
        at = addresses[n]
        block(
            x, writes, ring, mask, cos, sin, eps, carray(floats_at(at[0]), (width,)), carray(floats_at(at[1]), (every, width)),
            carray(floats_at(at[2]), (bias,)), carray(floats_at(at[3]), (norms,)), carray(floats_at(at[4]), (norms,)),
            carray(floats_at(at[5]), (width, heads * size)), carray(floats_at(at[6]), (width,)),
            carray(floats_at(at[7]), (2 * inner, width)), carray(floats_at(at[8]), (width, inner)),
            carray(floats_at(at[9]), (rows, slots, kv_heads, size)), carray(floats_at(at[10]), (rows, slots, kv_heads, size)),
        )  # fmt: skip
