"""Two gloo processes choose and learn what one does: plain, DDP, FSDP2 and with a feature hook.

`python -m tests.train.balance.test_processes` is one of the two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.close import assert_near
from tests.processes import two
from tests.train.balance.backward import HookedNet, backward
from train.balance.balancer import Balancer, FeatureHook
from train.balance.config import BalanceConfig
from train.distributed.fabric import leave

NAMES = ["a", "b", "c"]
METHODS = (
    *("mgda", "pcgrad", "gradvac", "cagrad", "nashmtl", "imtlg", "alignedmtl", "fairgrad"),
    *("excessmtl", "dbmtl", "moco", "gradnorm"),
)
TASK = torch.tensor([0, 1, 2, 0, 1, 2, 2, 0])
STEPS = 2


Net = partial(HookedNet, TASK)


def batch(step: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def total(values: Tensor) -> Tensor:
    dist.all_reduce(values)
    return values


def grads(net: nn.Module) -> Tensor:
    found = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in net.parameters()]
    return torch.cat([g.flatten() for g in found if g is not None])


Way = Callable[[Balancer, HookedNet, int, slice, Callable[[Tensor], Tensor]], Tensor]


def plain(balancer: Balancer, net: HookedNet, step: int, mine: slice, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    net.zero_grad()
    return backward(balancer, net(batch(step)[mine], TASK[mine]), list(net.parameters()), reduce=reduce).weights


def wrapped(wrap: Callable[[nn.Module], nn.Module]) -> Way:
    """Two micro-batches a step through the wrapper, one backward per task and micro-batch."""

    def way(balancer: Balancer, net: HookedNet, step: int, mine: slice, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        module, (low, high) = wrap(net), (mine.start, mine.stop)
        cuts = (slice(low, low + 1), slice(low + 1, high))
        passes = [lambda task, cut=cut: module(batch(step)[cut], TASK[cut])[task] for cut in cuts]
        parameters = list(net.parameters())
        rows, _, losses = balancer.gather(passes, parameters, reduce=reduce, run=lambda loss: (loss * 2).backward())
        return balancer.combine(losses, rows, parameters, reduce=reduce).weights

    return way


def fully_sharded(net: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    return net if isinstance(net, FSDPModule) else fully_shard(net, mesh=init_device_mesh("cpu", (2,)))


def check(rank: int) -> None:
    mine = (slice(0, 3), slice(3, 8))[rank]  # task c has one position here, two there
    ways: dict[str, Way] = {
        "plain": plain,
        "ddp": wrapped(lambda net: nn.parallel.DistributedDataParallel(net)),
        "fsdp": wrapped(fully_sharded),
    }
    for method in METHODS:
        for name, way in ways.items():
            one, two = (Balancer(BalanceConfig(method, "parameters"), NAMES) for _ in range(2))
            alone, together = Net(), Net()
            for step in range(STEPS):
                wanted = plain(one, alone, step, slice(0, 8), lambda x: x)
                got = way(two, together, step, mine, total)
                assert_near(got, wanted, 1e-5, f"{method} {name} weights")
                assert_near(grads(together), grads(alone), 1e-5, f"{method} {name}")
    for method in ("mgda", "graddrop", "excessmtl"):
        one_hook = FeatureHook(Balancer(BalanceConfig(method, "features"), NAMES))
        two_hook = FeatureHook(Balancer(BalanceConfig(method, "features"), NAMES), total)
        two_hook.scale = 2.0  # losses are multiplied by the number of processes, whose gradients DDP averages
        alone, module = Net(one_hook), nn.parallel.DistributedDataParallel(Net(two_hook))
        for step in range(STEPS):
            alone.zero_grad()
            module.zero_grad()
            alone(batch(step), TASK).sum().backward()
            (module(batch(step)[mine], TASK[mine]).sum() * 2).backward()
            assert one_hook.report is not None and two_hook.report is not None
            assert_near(two_hook.report.weights, one_hook.report.weights, 1e-5, f"{method} hook weights")
            assert_near(grads(module), grads(alone), 1e-5, f"{method} hook")


def main() -> None:
    dist.init_process_group("gloo")
    check(dist.get_rank())
    leave()


@pytest.mark.long
def test_two_processes_are_one() -> None:
    both = two("tests.train.balance.test_processes")
    assert [ended.code for ended in both] == [0, 0], both


if __name__ == "__main__":
    main()
