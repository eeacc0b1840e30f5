"""A decoder's step in int8 on a CPU, compiled by numba: products, where oneDNN has no exact one, and what lies between them.

A product reads its weight once, as fast as memory gives it. Each thread of PyTorch's takes some outputs, and more when it is
done, so that one whose core has other work delays nobody. What a row gives does not depend on the others, nor on the threads.

B rows, K inputs, N outputs; the others are those of `omni.cpu.compiled`.
"""

from __future__ import annotations

from ctypes import Structure, c_int64
from functools import reduce
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from omni.cpu.compiled import (
    attend_all,
    clear,
    compiled_for_threads,
    compiled_function,
    floats_at,
    integers_at,
    norm_factor,
    pointer_to,
    rotate_and_keep,
    swiglu,
    take,
)  # fmt: skip
from omni.utils.hardware import in_threads

SHARED = 1 << 18
"""Products of two numbers from which on threads share a product or an attention: one takes 10 us for so many."""


class SharedProduct(Structure):
    """Arguments of the threads of a product.

    taken: outputs that a thread has taken by now; each: outputs that one takes at a time; rows, inputs, outputs: B, K, N; x,
    weight, scale, out: addresses.
    """

    _fields_ = [(name, c_int64) for name in ("taken", "each", "rows", "inputs", "outputs", "x", "weight", "scale", "out")]


def multiply(x: Any, weight: Any, scale: Any, out: Any, threads: int) -> None:
    """Write the exact products [B, N] of rows [B, K] uint8, whose 0 is 128, and a weight [N, K] int8, times the scale [N], to
    `out` float32; all of them are tensors without gaps. `threads` share it, if it is large enough."""
    (rows, inputs), outputs = x.shape, len(weight)
    threads = threads if rows * inputs * outputs >= SHARED else 1
    each = outputs if threads == 1 else max(outputs // (4 * threads), 8)
    addresses = (tensor.data_ptr() for tensor in (x, weight, scale, out))
    in_threads(compiled_for_threads(share_product).address, SharedProduct(0, each, rows, inputs, outputs, *addresses), threads)


_bytes, _signed = map(pointer_to, (types.uint8, types.int8))


def _tile(outputs: int, rows: int) -> Any:
    """An intrinsic that sums the products of `outputs` rows of a weight, int8, and `rows` rows, int16, [rows, outputs] int32.

    Of loops over int16, numba makes sums in int64. Here 16 products are summed by twos, which AVX2 has one instruction for.

    Its arguments: the address of the first row and the numbers between two of them, the same of the weight, the number of
    products of each sum (the next lower multiple of 16 is taken), the address of the sums.
    """

    def sums(context: Any, x: Any, x_step: Any, weight: Any, step: Any, inputs: Any, out: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            int8, int16, int32, int64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
            wide = ir.VectorType(int32, 16)

            def read(item: Any, address: Any, step: Any, row: int, k: Any) -> Any:
                at = builder.add(builder.mul(step, int64(row)), k)
                pointer = builder.gep(builder.inttoptr(address, item.as_pointer()), [at])
                vector = builder.load(builder.bitcast(pointer, ir.VectorType(item, 16).as_pointer()), align=item.width // 8)
                return builder.sext(vector, wide)

            def every_second(vector: Any, first: int) -> Any:
                indices = ir.Constant(ir.VectorType(int32, 8), [int32(k) for k in range(first, 16, 2)])
                return builder.shuffle_vector(vector, vector, indices)

            zeros = ir.Constant(ir.VectorType(int32, 8), None)
            held = [[cgutils.alloca_once_value(builder, zeros) for _ in range(outputs)] for _ in range(rows)]
            with cgutils.for_range_slice(builder, int64(0), builder.and_(arguments[4], int64(-16)), int64(16)) as (k, _):
                here = [read(int16, arguments[0], arguments[1], row, k) for row in range(rows)]
                for n in range(outputs):
                    weights = read(int8, arguments[2], arguments[3], n, k)
                    for row in range(rows):
                        products, sum_ = builder.mul(here[row], weights), held[row][n]
                        pairs = builder.add(every_second(products, 0), every_second(products, 1))
                        builder.store(builder.add(builder.load(sum_), pairs), sum_)
            target = builder.inttoptr(arguments[5], int32.as_pointer())
            for index, sum_ in enumerate(sum_ for row in held for sum_ in row):
                parts = [builder.extract_element(builder.load(sum_), int32(k)) for k in range(8)]
                builder.store(reduce(builder.add, parts), builder.gep(target, [int64(index)]))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return intrinsic(sums)


_two_rows: Any = _tile(1, 2)
_four_rows: Any = _tile(2, 4)


@compiled_function
def _multiply_int8(x: Any, weight: Any, scale: Any, out: Any, first: Any, last: Any) -> None:
    """Write the outputs `first` to `last` of the exact products [B, N] of rows [B, K] int16 and a weight [N, K] int8, times
    its scale [N].

    Two rows at a time and an output, which reads a weight fastest, or four rows and two outputs; the last ones may be of both.
    """
    rows, inputs, many = x.shape[0], x.shape[1], x.shape[0] >= 4
    tall, wide = (4, 2) if many else (2, 1)
    sums, row_step = np.empty(8, np.int32), inputs if rows >= tall else 0
    for low in range(0, rows, 32):  # which the processor's cache holds
        for n in range(first, last, wide):
            step = inputs if n + wide <= last and wide == 2 else 0
            for start in range(low, min(low + 32, rows), tall):
                b = max(min(start, rows - tall), 0)
                if many:
                    _four_rows(x[b].ctypes.data, row_step, weight[n].ctypes.data, step, inputs, sums.ctypes.data)
                else:
                    _two_rows(x[b].ctypes.data, row_step, weight[n].ctypes.data, step, inputs, sums.ctypes.data)
                for i in range(tall if row_step else 1):
                    for j in range(wide if step else 1):
                        total = np.int64(sums[i * wide + j])
                        for k in range(inputs // 16 * 16, inputs):
                            total += np.int64(x[b + i, k]) * np.int64(weight[n + j, k])
                        out[b + i, n + j] = np.float32(total) * scale[n + j]


def share_product(task: Any) -> None:
    """Computes a thread's share of a product."""
    each, rows, inputs, outputs = task[1], task[2], task[3], task[4]
    held, weight = carray(_bytes(task[5]), (rows, inputs)), carray(_signed(task[6]), (outputs, inputs))
    scale, out = carray(floats_at(task[7]), (outputs,)), carray(floats_at(task[8]), (rows, outputs))
    x = np.empty((rows, inputs), np.int16)
    for b in range(rows):
        for k in range(inputs):
            x[b, k] = np.int16(held[b, k]) - np.int16(128)
    first = take(task, each)
    while first < outputs:
        _multiply_int8(x, weight, scale, out, first, min(first + each, outputs))
        first = take(task, each)


# --- between the products of a step -----------------------------------------------------------------------------------


@compiled_function
def _round(x: Any, high: Any, low: Any) -> Any:
    """Write x [K] as `omni.cpu.int8.rounded` does, and return its largest |x|; as whole numbers, of which NaN is largest."""
    pattern, most = x.view(np.int32), np.int32(0)
    for k in range(len(x)):
        most = max(most, pattern[k] & np.int32(0x7FFFFFFF))
    bits = np.empty(1, np.int32)
    bits[0] = most
    largest = bits.view(np.float32)[0]
    factor = np.float32(256 * 127) / largest
    for k in range(len(x)):
        scaled = np.int32(x[k] * factor + np.float32(0x8080 + 0.5))
        high[k], low[k] = np.uint8(scaled >> np.int32(8)), np.uint8(scaled)
    return largest


@compiled_function
def add(x: Any, products: Any, factor: Any) -> None:
    """Add products [B or 0, W] times `factor` [B] to x [B, W]."""
    for b in range(len(products)):
        here, more, times = x[b], products[b], factor[b]
        for k in range(len(here)):
            here[k] += more[k] * times


@compiled_function
def add_and_round_norm(x: Any, products: Any, norm: Any, eps: Any, held: Any, factor: Any) -> None:
    """`add`, and round the norm of the sum, before it is divided by its length, to `held` and `factor`."""
    add(x, products, factor)
    scaled = np.empty(x.shape[1], np.float32)
    for b in range(x.shape[0]):
        here = x[b]
        for k in range(len(norm)):
            scaled[k] = here[k] * norm[k]
        factor[b] = _round(scaled, held[0, b], held[1, b]) * norm_factor(here, eps)


@compiled_function
def write_heads(
    products: Any, factor: Any, bias: Any, active: Any, writes: Any, cos: Any, sin: Any, eps: Any, q_norm: Any, k_norm: Any,
    keys: Any, values: Any, wide: Any,
) -> None:  # fmt: skip
    """Write the products [B, (H + 2 G) D] of q, k and v times `factor` [B], with biases, of the rows `active` [N] to `wide`, q
    and k rotated, and keys and values to the cache (see `block`)."""
    slots, kv_heads, size = keys.shape[1], keys.shape[2], keys.shape[3]
    every = products.shape[1] // size
    for i in range(len(active)):
        b, qkv_row = active[i], wide[i]
        source, times, row, slot = products[b], factor[b], writes[b] // slots, writes[b] % slots
        for k in range(len(qkv_row)):
            qkv_row[k] = source[k] * times
        for k in range(len(bias)):
            qkv_row[k] += bias[k]
        t = qkv_row.reshape(every, size)
        rotate_and_keep(t, every - 2 * kv_heads, row, slot, cos[b], sin[b], eps, q_norm, k_norm, keys, values)


@compiled_function
def round_rows(y: Any, active: Any, held: Any, factor: Any) -> None:
    """Round rows y [N, K] to `held` and `factor` of the rows `active` [N] of a step; the others' factor is 0."""
    clear(factor)
    for i in range(len(active)):
        factor[active[i]] = _round(y[i], held[0, active[i]], held[1, active[i]])


@compiled_function
def gate_and_round(products: Any, factor: Any, held: Any) -> None:
    """Round silu(gate) * up of the products [B, 2 F] of both to `held` and `factor`."""
    inner = products.shape[1] // 2
    gated, bits = np.empty(inner, np.float32), np.empty(inner, np.int32)
    powers = bits.view(np.float32)
    for b in range(len(factor)):
        swiglu(products[b, :inner], products[b, inner:], factor[b], gated, bits, powers)
        factor[b] = _round(gated, held[0, b], held[1, b])


# --- an attention that threads share ---------------------------------------------------------------------------------


class SharedAttention(Structure):
    """Arguments of the threads of an attention (`attend`).

    taken: parts that a thread has taken by now; rows: N; columns: B; of: R; seen: V; active ... out: addresses.
    """

    _fields_ = [
        (name, c_int64)
        for name in (
            "taken", "rows", "columns", "of", "slots", "heads", "kv_heads", "size", "seen", "ring", "active", "writes", "mask",
            "wide", "keys", "values", "out",
        )
    ]  # fmt: skip


def attend(task: SharedAttention, threads: int) -> None:
    """Attention as of `attend_all`, by so many threads where it is large enough."""
    task.taken = 0
    large = task.rows * task.heads * task.size * task.seen >= SHARED
    in_threads(compiled_for_threads(share_attention).address, task, threads if large else 1)


def share_attention(task: Any) -> None:
    """Computes a thread's share of an attention."""
    rows, columns, of, slots, heads, kv_heads, size = task[1], task[2], task[3], task[4], task[5], task[6], task[7]
    wide = carray(floats_at(task[13]), (rows, (heads + 2 * kv_heads) * size))
    out = carray(floats_at(task[16]), (rows, heads * size))
    active, writes = carray(integers_at(task[10]), (rows,)), carray(integers_at(task[11]), (columns,))
    mask, shape = carray(floats_at(task[12]), (columns, task[8])), (of, slots, kv_heads, size)
    keys, values = carray(floats_at(task[14]), shape), carray(floats_at(task[15]), shape)
    attend_all(task, wide, active, writes, task[9] != 0, heads, keys, values, mask, out)
