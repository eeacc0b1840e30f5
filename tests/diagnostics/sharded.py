"""Patches of a model under `fully_shard` (FSDP2), in two gloo processes: what torch makes of each, and what the guard says.

`python -m tests.diagnostics.sharded` is one of the processes (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say which); the
first prints a JSON object of name to `[outcome, findings]`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from omni.diagnostics import Guard
from train.distributed.fabric import leave

WIDTH = 8
X = torch.ones(3, WIDTH)
MOMENTS = ("first", "after evaluation", "after training")
"""When the patch comes: in the first forward of all, or after one without gradients, or after one with backward."""
GIVEN = ("plain", "sharded")
FORWARDS = ("hook", "forward", "forward of another", "none", "not called")


def plain_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def sharded_model(mesh: DeviceMesh, apart: bool, moment: str) -> nn.Sequential:
    """`apart`: the second linear is a group of its own, else both belong to the root's."""
    model = plain_model()
    if apart:
        fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    if moment == "after evaluation":
        with torch.no_grad():
            model(X)
    elif moment == "after training":
        model(X).sum().backward()
    return model


def outcome(run: Callable[[], Tensor], patched: Tensor) -> str:
    """`taken` or `ignored` by what comes out, `refused` where it fails."""
    try:
        out = run()
    except (RuntimeError, AttributeError):  # mixed tensors; a tensor without a shard
        return "refused"
    wanted = {"taken": patched, "ignored": plain_model()(X)}
    return next((name for name, value in wanted.items() if torch.allclose(out, value, atol=1e-5)), "other")


def replaced(mesh: DeviceMesh, given: str, apart: bool, moment: str, number: int) -> list[Any]:
    """Another weight through `torch.func.functional_call`, as a plain tensor or as a sharded one."""
    model, name = sharded_model(mesh, apart, moment), f"{number}.weight"
    weight = plain_model().get_parameter(name).detach() + 1
    wanted = torch.func.functional_call(plain_model(), {name: weight}, X)
    if given == "sharded":
        own = model.get_parameter(name)
        weight = distribute_tensor(weight, mesh, own.placements if isinstance(own, DTensor) else None)
    guard = Guard(model)

    def run() -> Tensor:
        with guard.expect_changed(model[number], weight):
            return torch.func.functional_call(model, {name: weight}, X)

    return [outcome(run, wanted), [f.message for f in guard.findings]]


def patched(mesh: DeviceMesh, how: str, apart: bool, moment: str) -> list[Any]:
    """A patch of the second linear that adds one, or that should have added it with the module's own weights."""
    model, guard = sharded_model(mesh, apart, moment), None
    inner = model[1]
    plain = inner.forward
    if how == "hook":
        inner.register_forward_hook(lambda module, args, out: out + 1)
    elif how == "forward":
        inner.forward = lambda x: plain(x) + 1
    elif how == "forward of another":
        inner.forward = plain_model()[1].forward
    guard = Guard(model)

    def run() -> Tensor:
        with guard.expect_changed(inner):
            return model[0](X) if how == "not called" else model(X)

    wanted = plain_model()(X) + (1 if how in ("hook", "forward") else 0)
    if how == "forward of another":
        wanted = torch.full((), torch.nan)  # the weights of the module are ignored, whatever comes out
    return [outcome(run, wanted), [f.message for f in guard.findings]]


def evaluated(mesh: DeviceMesh, traced: bool) -> list[Any]:
    """Steps after an evaluation, which leaves the root's parameters gathered; and one after which a parameter has no owner."""
    model = sharded_model(mesh, True, "first")
    idle = list(model[0].parameters()) if traced else []
    optimizer, said = torch.optim.SGD(model.parameters(), lr=0.1), list[list[str]]()
    for owned in (True, False):
        if not owned:
            optimizer = torch.optim.SGD([*model[1].parameters(), model[0].weight], lr=0.1)
        guard = Guard(model, optimizer, idle=idle)
        for _ in range(2):
            with torch.no_grad():
                model(X)
            with guard.step(trace=traced):
                optimizer.zero_grad()
                model(X).sum().backward()
                optimizer.step()
        said.append([f"{f.kind} {f.tensor}" for f in guard.findings])
    return said


@contextmanager
def processes() -> Iterator[DeviceMesh]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        yield init_device_mesh("cpu", (int(dist.get_world_size()),))
    finally:
        leave()


def main() -> None:
    said: dict[str, list[Any]] = {}
    with processes() as mesh:
        for apart, moment in itertools.product((False, True), MOMENTS):
            where = f"{'apart' if apart else 'together'}, {moment}"
            for given, number in itertools.product(GIVEN, (0, 1)):
                said[f"functional_call, {given} {number}, {where}"] = replaced(mesh, given, apart, moment, number)
            for how in FORWARDS:
                said[f"{how}, {where}"] = patched(mesh, how, apart, moment)
            dist.barrier()
        for traced in (False, True):
            said[f"evaluated, traced {traced}"] = evaluated(mesh, traced)
        if dist.get_rank() == 0:
            print(json.dumps(said))


if __name__ == "__main__":
    main()
