"""Chooses how a CPU multiplies few rows: of several equal forms of a product, the one that measured fastest on this machine.

`F.linear` of two float32 rows reads its weight at a fifth of what memory gives on some processors, and `mm(w, x.T)` does not.
Which form is fast depends on processor, threads, PyTorch, number format, rows and shape, so forms are measured
(`measure_kernels`) over all weights of a model in the order of a step, which is to say from memory and not from a cache, and
kept in the user's cache folder. Used for inference only: where autograd records, and without `use_kernels`, `F.linear` is
called. Forms agree to rounding (1e-5 relative in float32).

A block's step is compiled where that measured faster, in int8, and in float32 of a small model; of that also its prefill and
its encoder (`omni.cpu.compiled`).

M rows, K inputs, N outputs.
"""

from __future__ import annotations

import json
import logging
import platform
import statistics
import time
import zlib
from collections.abc import Callable, Container, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numba
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni.cpu import compiled, shared_products
from omni.cpu.shared_products import multiply as multiply_shared
from omni.errors import UserError
from omni.files import cache_folder, write_json
from omni.utils.hardware import multiplies_bf16
from omni.utils.private import has_forward_hooks

LOG = logging.getLogger(__name__)

Form = Callable[[Tensor, Tensor], Tensor]
"""Product [M, N] of rows [M, K] and a weight [N, K]."""

ROWS = (1, 2, 4, 8)
"""Numbers of rows that are measured; those between take the next larger one's form, more are always `F.linear`'s."""

FASTER = 0.85
"""Share of the time of `F.linear` that a form may take at most, in every repeat, to replace it."""

STEP_FASTER = 0.95
"""Share of the modules' time, by the quickest of some steps, that a compiled step may take at most."""

BF16_FASTER = 1.2
"""How many times faster bfloat16 must be than float32, each in its best forms, to become the default."""

REPEATS = 3

SMALL = 1 << 20
"""Numbers in the weights of a float32 block up to which its step is compiled, for one thread."""

STEP_SIZES = {"step": ((1, 1), (4, 1)), "prefill": ((1, 64), (3, 32)), "encoder": ((1, 1), (3, 1))}
"""Rows and columns of measured steps, and clips and seconds of an encoder's."""

STEP_KEYS, STEPS = 256, 15
"""Keys of measured steps, and how many of them are taken, of which the quickest counts."""


def _padded(form: Form, least: int) -> Form:
    def product(rows: Tensor, weight: Tensor) -> Tensor:
        count = rows.shape[0]
        return form(rows, weight) if count >= least else form(F.pad(rows, (0, 0, 0, least - count)), weight)[:count]

    return product


def _weight_first(rows: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(weight, rows.t()).t().contiguous()  # of another order in memory, the next product takes a slow way


def _compiled_product(rows: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty(len(rows), len(weight))
    multiply_shared(
        str(weight.dtype).removeprefix("torch."), rows.float(), weight.contiguous(), None, out, torch.get_num_threads()
    )
    return out.to(weight.dtype)


REFERENCE, MODULES, COMPILED = "linear", "modules", "compiled"
FORMS: Mapping[str, Form] = {
    REFERENCE: F.linear,
    "weight first": _weight_first,
    "weight first, 2 rows": _padded(_weight_first, 2),
    "weight first, 4 rows": _padded(_weight_first, 4),
    "linear, 4 rows": _padded(F.linear, 4),
    COMPILED: _compiled_product,
}


class Product(NamedTuple):
    """Key of a product's measurement. `dtype` is a name such as `float32`."""

    threads: int
    dtype: str
    rows: int
    inputs: int
    outputs: int


class StepShape(NamedTuple):
    """A block whose step is measured. `dtype` is `float32` or `int8`."""

    dtype: str
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int


class StepKey(NamedTuple):
    """Key of a block's measurement. `part` is `step` (a column of each row), `prefill` (several), or `encoder`."""

    threads: int
    part: str
    shape: StepShape


class Timing(NamedTuple):
    """The form that is used, and seconds of it and of `F.linear`, or of the modules."""

    form: str
    seconds: float
    reference: float


class Kernels:
    """The forms of products that were measured on this machine, for `multiply`, and those of a block's step."""

    def __init__(self, measured: Mapping[Product, Timing], steps: Mapping[StepKey, Timing] | None = None) -> None:
        self.measured, self.steps = dict(measured), dict(steps or {})
        self._compiled = {key for key, timing in self.steps.items() if timing.form == COMPILED}
        self._forms: dict[tuple[int, torch.dtype, int, int, int], Form] = {}
        for key, timing in self.measured.items():
            if timing.form != REFERENCE:
                named = (key.threads, getattr(torch, key.dtype), key.rows, key.inputs, key.outputs)
                self._forms[named] = FORMS[timing.form]

    def form(self, rows: int, dtype: torch.dtype, outputs: int, inputs: int) -> Form | None:
        """The form for a product; None for `F.linear`."""
        if rows > ROWS[-1]:
            return None
        measured = rows if rows < 3 else 4 if rows < 5 else 8
        return self._forms.get((torch.get_num_threads(), dtype, measured, inputs, outputs))

    def compiled(self, shape: StepShape, part: str = "step") -> bool:
        """Whether a block is compiled for a `part` (`StepKey`)."""
        return (torch.get_num_threads(), part, shape) in self._compiled


def multiply(kernels: Kernels | None, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear(x, weight, bias)` of x [..., K], in the form that measured fastest."""
    form = None
    if kernels is not None and not torch.is_grad_enabled() and x.device.type == "cpu" and weight.dtype == x.dtype:
        form = kernels.form(x.numel() // x.shape[-1], x.dtype, *weight.shape)
    if form is None or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight, bias)
    out = form(x.reshape(-1, x.shape[-1]).contiguous(), weight)
    if bias is not None:
        out = out + bias
    return out.reshape(*x.shape[:-1], weight.shape[0])


def apply(kernels: Kernels | None, linear: nn.Module, x: Tensor) -> Tensor:
    """`linear(x)`; of a plain linear without anything beside it in the form that measured fastest."""
    if kernels is None or type(linear) is not nn.Linear or has_forward_hooks(linear):
        return linear(x)  # type: ignore[no-any-return]
    return multiply(kernels, x, linear.weight, linear.bias)


def use_kernels(model: nn.Module, kernels: Kernels | None) -> None:
    """Let the decoder of a model that serves multiply in measured forms; None for `F.linear` alone."""
    for part in model.modules():
        if hasattr(type(part), "kernels"):
            part.kernels = kernels  # type: ignore[assignment]


# --- measuring -----------------------------------------------------------------------------------------------------


def measure_kernels(model: nn.Module, rows: Sequence[int] = (1, 2)) -> Kernels:
    """Measures the products of a model's decoder on this machine, keeps what was found, and uses it.

    Takes a few seconds for 0.5B parameters. A float32 model is measured in bfloat16 besides where the processor multiplies
    that fast (over the same memory, whose bytes do not matter). Of a model in int8 the step alone is measured; one on a GPU is
    left alone.

    Args:
        rows: of `ROWS`.
    """
    weights = step_weights(model)
    if any(p.device.type != "cpu" for p in model.parameters()):
        return Kernels({})
    measured: dict[Product, Timing] = {}
    dtypes = [weights[0].dtype] if weights else []
    if dtypes == [torch.float32] and multiplies_bf16("cpu"):
        dtypes.append(torch.bfloat16)
    for dtype in dtypes:
        for count in rows:
            measured |= _measure([_as(weight, dtype) for weight in weights], count)
    kept = load_kernels()
    kernels = Kernels({**kept.measured, **measured}, {**kept.steps, **_measure_step(model)})
    if not kernels.measured and not kernels.steps:
        return kernels
    keep_kernels(kernels)
    use_kernels(model, kernels)
    return kernels


def step_weights(model: nn.Module) -> list[Tensor]:
    """The weights [N, K] in float32 or bfloat16 that a step multiplies, in its order."""
    decoder: Any = getattr(model, "decoder", model)
    heads = [decoder.audio_head, decoder.text_embedding if decoder.text_head is None else decoder.text_head]
    linears = [part for part in decoder.modules() if type(part) is nn.Linear and part not in heads]
    linears += [part for part in heads if type(part) in (nn.Linear, nn.Embedding)]
    return [part.weight.detach() for part in linears if part.weight.dtype in (torch.float32, torch.bfloat16)]


def _as(weight: Tensor, dtype: torch.dtype) -> Tensor:
    if weight.dtype == dtype:
        return weight
    return weight.flatten().view(dtype)[: weight.numel()].view(weight.shape)


@torch.inference_mode()
def _measure(weights: Sequence[Tensor], rows: int) -> dict[Product, Timing]:
    """The best form for each shape among the weights, for some number of rows."""
    threads, dtype = torch.get_num_threads(), weights[0].dtype
    inputs = {w.shape[1]: torch.ones(rows, w.shape[1], dtype=dtype) for w in weights}
    spent: dict[str, list[dict[tuple[int, int], float]]] = {name: [] for name in FORMS}
    FORMS[COMPILED](torch.ones(1, 1, dtype=dtype), torch.ones(1, 1, dtype=dtype))  # compiles it, the first time
    for _ in range(REPEATS):
        for name, form in FORMS.items():
            taken: dict[tuple[int, int], float] = {}
            for w in weights:
                x, shape = inputs[w.shape[1]], (w.shape[0], w.shape[1])
                start = time.perf_counter()
                form(x, w)
                taken[shape] = taken.get(shape, 0.0) + time.perf_counter() - start
            spent[name].append(taken)
    timings = {}
    for shape in {(w.shape[0], w.shape[1]) for w in weights}:
        count = sum(tuple(w.shape) == shape for w in weights)
        times = {name: [run[shape] / count for run in runs] for name, runs in spent.items()}
        timings[Product(threads, str(dtype).removeprefix("torch."), rows, shape[1], shape[0])] = choose(times)
    return timings


@torch.inference_mode()
def _measure_step(model: nn.Module) -> dict[StepKey, Timing]:
    """The best form of blocks for each part of `STEP_SIZES`: better for each of its sizes."""
    decoder, encoder = (getattr(model, name, None) for name in ("decoder", "encoder"))
    parts: dict[str, StepShape | None] = {}
    if decoder is not None:
        parts["step"] = shape = decoder.step_shape()
        parts["prefill"] = None if shape is None or shape.dtype == "int8" else shape  # whose products are nearly all of it
    if encoder is not None and hasattr(encoder, "compiled_shape"):
        parts["encoder"] = encoder.compiled_shape()
    parts = {part: shape for part, shape in parts.items() if shape is not None}
    if parts:
        LOG.info("measuring steps; the first time on a processor they are compiled, for half a minute")
    timings, threads = {}, torch.get_num_threads()
    for part, shape in parts.items():
        assert shape is not None
        key = StepKey(threads, part, shape)
        forms = {form: Kernels({}, {key: Timing(form, 1.0, 1.0)}) for form in (MODULES, COMPILED)}
        chosen = []
        for size in STEP_SIZES[part]:
            work, times = _work(model, part, *size), {form: list[float]() for form in forms}
            for _ in range(1 + STEPS):  # in turn, since the machine's pace changes; the first ones compile
                for form, kernels in forms.items():
                    use_kernels(model, kernels)
                    start = time.perf_counter()
                    work()
                    times[form].append(time.perf_counter() - start)
            chosen.append(choose({form: [min(taken[1:])] for form, taken in times.items()}, MODULES, STEP_FASTER))
        timings[key] = next((timing for timing in chosen if timing.form == MODULES), chosen[0])
    return timings


def _work(model: Any, part: str, rows: int, columns: int) -> Callable[[], object]:
    """The call that is timed for a part."""
    decoder, encoder = model.decoder, model.encoder
    if part == "encoder":
        sound = torch.linspace(-1, 1, 16_000 * columns).sin()
        features = encoder.config.features(sound)
        lengths, frames = [features.shape[-1]] * rows, [encoder.config.clip_frames(len(sound))] * rows
        return lambda: encoder(features.expand(rows, -1, -1), lengths, frames)
    keys = min(STEP_KEYS, decoder.config.context)
    columns = min(columns, keys)
    cache = model.make_cache(rows, keys, chunk=columns)
    position = torch.arange(keys - columns, keys).expand(rows, columns)
    column = torch.zeros(rows, len(decoder.layout), columns, dtype=torch.long)
    return lambda: decoder(column, input_pos=position, cache=cache)


def choose(times: Mapping[str, Sequence[float]], usual: str = REFERENCE, faster: float = FASTER) -> Timing:
    """The fastest of the forms that took at most `faster` of the time of the usual one in every repeat; else that."""
    reference = times[usual]
    better = [n for n, taken in times.items() if all(a <= faster * b for a, b in zip(taken, reference, strict=True))]
    best = min(better, key=lambda name: statistics.median(times[name]), default=usual)
    return Timing(best, statistics.median(times[best]), statistics.median(reference))


def serve_measured(model: nn.Module, any_dtype: bool) -> None:
    """Let a model that is read for inference use what was measured before; with `any_dtype` also to become bfloat16."""
    kernels = load_kernels()
    if not kernels.measured and not kernels.steps:
        return
    if any_dtype and bf16_pays(model, kernels):
        model.to(torch.bfloat16)
        LOG.info(
            "bfloat16, which measured %.1f times as fast as float32 here or more; dtype float32 keeps float32", BF16_FASTER
        )
    use_kernels(model, kernels)


def bf16_pays(model: nn.Module, kernels: Kernels) -> bool:
    """Whether a step of this float32 model was measured `BF16_FASTER` times faster in bfloat16, each in its best forms.

    Never on a processor that only has few rows' products as fast: prompts would take several times as long.
    """
    if not multiplies_bf16("cpu"):
        return False
    spent = {"float32": 0.0, "bfloat16": 0.0}
    for weight in step_weights(model):
        for dtype in spent:
            timing = kernels.measured.get(Product(torch.get_num_threads(), dtype, 1, weight.shape[1], weight.shape[0]))
            if timing is None or weight.dtype != torch.float32:
                return False
            spent[dtype] += timing.seconds
    return spent["float32"] >= BF16_FASTER * spent["bfloat16"] > 0


# --- what is kept --------------------------------------------------------------------------------------------------


def machine() -> dict[str, str]:
    """The processor and PyTorch that measurements belong to."""
    cpu = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return {"processor": str(cpu.get("cpu_name") or platform.processor() or platform.machine()), "torch": torch.__version__}


@cache
def compiler() -> str:
    """Version of numba and checksum of the compiled code: another one compiles at the first question, and may be slower."""
    code = b"".join(Path(str(module.__file__)).read_bytes() for module in (compiled, shared_products))
    return f"{numba.__version__} {zlib.crc32(code):08x}"


def kernels_file() -> Path:
    """The file of this machine's measurements; another processor's or PyTorch's have a file of their own."""
    return cache_folder() / f"kernels-{zlib.crc32(json.dumps(machine()).encode()):08x}.json"


def load_kernels() -> Kernels:
    """Reads this machine's measurements; empty where they are another machine's, or the file is damaged (logged).

    Compiled forms count only where numba's cache has them: another copy of this package would compile at its first question."""
    path = kernels_file()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["machine"] != machine():
            return Kernels({})
        same = data.get("compiler") == compiler()
        products, steps = data["products"], data["blocks"] if same else []
        fast = same and compiled.is_kept(compiled.product)
        return Kernels(
            {
                Product(*_fields(key, Product)): timing
                for key, value in products
                if (timing := _timing(value, FORMS)).form != COMPILED or fast
            },
            {
                key: timing
                for (threads, part, shape), value in steps
                if (timing := _timing(value, (MODULES, COMPILED)))
                and (key := StepKey(threads, _part(part), StepShape(*_fields(shape, StepShape))))
                and (timing.form != COMPILED or compiled.is_kept(_compiled_step(key)))
            },
        )
    except FileNotFoundError:
        return Kernels({})
    except (OSError, ValueError, KeyError, TypeError) as error:
        LOG.warning("%s is left out: it is damaged (%s); measuring again replaces it", path, error)
        return Kernels({})


def _compiled_step(key: StepKey) -> Callable[..., Any]:
    """The function of a measured step that takes longest to compile."""
    if key.part == "encoder":
        return compiled.encoder
    return compiled.blocks if key.shape.dtype == "float32" else compiled.share_attention


_FIELDS: Mapping[type[Any], Sequence[type[Any]]] = {
    Product: (int, str, int, int, int), StepShape: (str, int, int, int, int, int), Timing: (str, float, float)
}  # fmt: skip


def _fields(values: Any, record: type[Any]) -> Sequence[Any]:
    if not isinstance(values, list) or [type(v) for v in values] != list(_FIELDS[record]):
        raise ValueError(f"{values!r} is no {record.__name__}")
    if record is not Timing and not {"float32", "bfloat16", "int8"}.intersection(v for v in values if isinstance(v, str)):
        raise ValueError(f"{values!r} has no number format")
    return values


def _part(name: Any) -> str:
    if name not in STEP_SIZES:
        raise ValueError(f"{name!r} is no part")
    return str(name)


def _timing(values: Any, forms: Container[str]) -> Timing:
    timing = Timing(*_fields(values, Timing))
    if timing.form not in forms or not min(timing[1:]) > 0:
        raise ValueError(f"{values!r} is no measurement")
    return timing


def keep_kernels(kernels: Kernels) -> None:
    """Keep measurements for the next start. Of two that write at once the last stays, whole; a folder that cannot be written is
    told."""
    path = kernels_file()
    products = [[list(key), list(value)] for key, value in sorted(kernels.measured.items())]
    steps = [[[key.threads, key.part, list(key.shape)], list(value)] for key, value in sorted(kernels.steps.items())]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"machine": machine(), "products": products, "compiler": compiler(), "blocks": steps}, indent=None)
    except (OSError, UserError) as error:
        LOG.warning("measured kernels are not kept, %s cannot be written: %s", path, error)
