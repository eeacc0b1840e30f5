"""Products of few rows and a weight on a CPU, compiled by numba, whose outputs the threads of PyTorch share.

Such a product reads its weight once, as fast as memory gives it. Each thread takes some outputs, and more when it is done, so
that one whose core has other work delays nobody. The threads are those with which PyTorch computes; others would wait for a
core, since after an operation PyTorch's go on looking for the next one for a moment. What a row gives does not depend on the
others, nor on the threads.

B rows, K inputs, N outputs.
"""

from __future__ import annotations

from ctypes import Structure, c_int64
from functools import cache, reduce
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from omni.cpu.compiled import compiled_for_threads, compiled_function, compiled_sums, pointer_to, take
from omni.utils.hardware import in_threads

_ZERO = np.float32(0)

LEAST = 1 << 18
"""Products of two numbers from which on threads share them: one takes 10 us for so many."""


class SharedProduct(Structure):
    """Arguments of the threads of a product.

    taken: outputs that a thread has taken by now; each: outputs that one takes at a time; rows, inputs, outputs: B, K, N; x,
    weight, scale, out: addresses.
    """

    _fields_ = [(name, c_int64) for name in ("taken", "each", "rows", "inputs", "outputs", "x", "weight", "scale", "out")]


def multiply(dtype: str, x: Any, weight: Any, scale: Any, out: Any, threads: int) -> None:
    """Write the products [B, N] float32 of rows [B, K] and a weight [N, K] to `out`, all of them tensors without gaps.

    Args:
        dtype: of the weight: `float32` or `bfloat16` (rows float32), or `int8`: rows uint8, whose 0 is 128, exact sums, which
            are multiplied by the scale [N].
        scale: of int8, else None.
        threads: that share it, if it is large enough.
    """
    (rows, inputs), outputs = x.shape, len(weight)
    threads = threads if rows * inputs * outputs >= LEAST else 1
    each = outputs if threads == 1 else max(outputs // (4 * threads), 8)
    scaled = 0 if scale is None else scale.data_ptr()
    shared = SharedProduct(0, each, rows, inputs, outputs, x.data_ptr(), weight.data_ptr(), scaled, out.data_ptr())
    in_threads(compile_for(dtype).address, shared, threads)


@cache
def compile_for(dtype: str) -> Any:
    """The function that each thread calls, compiled on first use and cached as by `compiled_function`."""
    share = {"float32": _share_float32, "bfloat16": _share_bfloat16, "int8": _share_int8}[dtype]
    return compiled_for_threads(share)


_bytes, _signed, _halves, _floats = map(pointer_to, (types.uint8, types.int8, types.uint16, types.float32))


# --- float32 and bfloat16 ---------------------------------------------------------------------------------------------


def _float_of(context: Any, number: Any) -> Any:
    """The float32 of a number of a weight; bfloat16, as uint16, is the upper half of one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if number == types.float32:
            return arguments[0]
        wide = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(arguments[0], wide), wide(16)), ir.FloatType())

    return types.float32(number), generate


_widened: Any = intrinsic(_float_of)


@compiled_sums
def _multiply_floats(x: Any, weight: Any, out: Any, first: Any, last: Any) -> None:
    """Write the outputs `first` to `last`, two rows at a time, the last one perhaps twice."""
    rows, inputs = x.shape
    for n in range(first, last):
        here = weight[n]
        for b in range(0, rows, 2):
            other = min(b + 1, rows - 1)
            x0, x1, s0, s1 = x[b], x[other], _ZERO, _ZERO
            for k in range(inputs):
                number = _widened(here[k])
                s0 += x0[k] * number
                s1 += x1[k] * number
            out[b, n], out[other, n] = s0, s1


@compiled_function
def _share_floats(task: Any, weight: Any) -> None:
    each, rows, inputs, outputs = task[1], task[2], task[3], task[4]
    x, out = carray(_floats(task[5]), (rows, inputs)), carray(_floats(task[8]), (rows, outputs))
    first = take(task, each)
    while first < outputs:
        _multiply_floats(x, weight, out, first, min(first + each, outputs))
        first = take(task, each)


def _share_float32(task: Any) -> None:
    _share_floats(task, carray(_floats(task[6]), (task[4], task[3])))


def _share_bfloat16(task: Any) -> None:
    _share_floats(task, carray(_halves(task[6]), (task[4], task[3])))


# --- int8 -------------------------------------------------------------------------------------------------------------


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


def _share_int8(task: Any) -> None:
    each, rows, inputs, outputs = task[1], task[2], task[3], task[4]
    held, weight = carray(_bytes(task[5]), (rows, inputs)), carray(_signed(task[6]), (outputs, inputs))
    scale, out = carray(_floats(task[7]), (outputs,)), carray(_floats(task[8]), (rows, outputs))
    x = np.empty((rows, inputs), np.int16)
    for b in range(rows):
        for k in range(inputs):
            x[b, k] = np.int16(held[b, k]) - np.int16(128)
    first = take(task, each)
    while first < outputs:
        _multiply_int8(x, weight, scale, out, first, min(first + each, outputs))
        first = take(task, each)
