"""Multi-task projectors: networks between encoder and decoder with parts that tasks share and parts of single tasks.

Every module maps the features of positions, each of one task, `forward(features [N, C], task [N] long) -> [N, W]`. All of them
compute all of their parts for every position and select afterwards, so that each parameter takes part in every backward pass,
whichever tasks a batch holds.

Dimensions: N positions, C input width, W output width, M tasks, E experts (or branches, or towers).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni.errors import UserError, closest


class Bank(nn.Module):
    """Several linear maps with biases as one parameter: [N, C] (or one input each, [N, E, C]) to [N, E, W]."""

    def __init__(self, maps: int, inner: int, outer: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(inner)
        self.weight = nn.Parameter(torch.empty(maps, outer, inner).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(maps, outer))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("nc,ewc->new" if x.dim() == 2 else "nec,ewc->new", x, self.weight) + self.bias


class Experts(nn.Module):
    """Two layers with a GELU between: [N, C] (or [N, E, C]) to [N, E, W]."""

    def __init__(self, experts: int, inner: int, outer: int) -> None:
        super().__init__()
        self.up, self.down = Bank(experts, inner, outer), Bank(experts, outer, outer)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def of_task(values: Tensor, task: Tensor) -> Tensor:
    """Selects the entry of each position's own task: [N, M, ...] to [N, ...]."""
    return values[torch.arange(len(task), device=task.device), task]


class Hard(nn.Module):
    """One network for all tasks (Caruana 1993)."""

    def __init__(self, inner: int, outer: int, tasks: int) -> None:
        super().__init__()
        self.shared = Experts(1, inner, outer)

    def forward(self, features: Tensor, task: Tensor) -> Tensor:
        return self.shared(features)[:, 0]


class MMoE(nn.Module):
    """Experts that all tasks share, mixed by a gate of each task (Ma et al. 2018)."""

    def __init__(self, inner: int, outer: int, tasks: int, experts: int = 4) -> None:
        super().__init__()
        self.experts, self.gates = Experts(experts, inner, outer), Bank(tasks, inner, experts)

    def forward(self, features: Tensor, task: Tensor) -> Tensor:
        gate = of_task(self.gates(features), task).softmax(-1)
        return torch.einsum("ne,new->nw", gate, self.experts(features))


class DSelectK(nn.Module):
    """MMoE whose gates converge to at most `chosen` experts (Hazimeh et al. 2021, static gates).

    Each selector of a task is the number of an expert in binary, whose digits are smooth steps: 0 or 1 exactly beyond
    `width` / 2. E is a power of two, and at least 2: otherwise some numbers would name no expert, and there the gate and its
    gradient would be zero.
    """

    def __init__(self, inner: int, outer: int, tasks: int, experts: int = 4, chosen: int = 2, width: float = 1.0) -> None:
        super().__init__()
        self.number = experts
        self.experts, self.width = Experts(experts, inner, outer), width
        digits = math.ceil(math.log2(experts))
        self.digits = nn.Parameter(torch.empty(tasks, chosen, digits).uniform_(-width / 100, width / 100))
        self.mixture = nn.Parameter(torch.zeros(tasks, chosen))

    def gate(self) -> Tensor:
        """[M, E]; each row sums to 1."""
        t = (self.digits / self.width).clamp(-0.5, 0.5)
        step = (-2 * t**3 + 1.5 * t + 0.5)[:, :, None]
        device = self.digits.device
        codes = (torch.arange(self.number, device=device)[:, None] >> torch.arange(t.shape[-1], device=device)) & 1
        each = torch.where(codes.bool(), step, 1 - step).prod(-1)  # [M, chosen, E]
        return (self.mixture.softmax(-1)[:, :, None] * each).sum(1)

    def forward(self, features: Tensor, task: Tensor) -> Tensor:
        return torch.einsum("ne,new->nw", self.gate()[task], self.experts(features))


class PLE(nn.Module):
    """Progressive layered extraction (Tang et al. 2020): in every layer shared experts and experts of each task.

    A task's gate mixes its own and the shared ones; between layers a shared gate mixes all of them.
    """

    def __init__(self, inner: int, outer: int, tasks: int, layers: int = 2, shared: int = 2, own: int = 1) -> None:
        super().__init__()
        self.tasks, self.own, self.layers = tasks, own, layers
        widths = [inner, *[outer] * layers]
        self.common = nn.ModuleList(Experts(shared, c, w) for c, w in pairwise(widths))
        self.private = nn.ModuleList(Experts(tasks * own, c, w) for c, w in pairwise(widths))
        self.gates = nn.ModuleList(Bank(tasks, c, shared + own) for c in widths[:-1])
        self.mixers = nn.ModuleList(nn.Linear(c, shared + tasks * own) for c in widths[: layers - 1])

    def forward(self, features: Tensor, task: Tensor) -> Tensor:
        shared, own = features, features[:, None].expand(-1, self.tasks, -1)  # [N, C], [N, M, C]
        for i in range(self.layers):
            common = self.common[i](shared)
            private = self.private[i](own.repeat_interleave(self.own, 1))
            per_task = private.unflatten(1, (self.tasks, self.own))
            gates = self.gates[i](own).softmax(-1)
            choices = torch.cat([per_task, common[:, None].expand(-1, self.tasks, -1, -1)], dim=2)
            if i + 1 < self.layers:
                mixture = self.mixers[i](shared).softmax(-1)
                shared = torch.einsum("ne,new->nw", mixture, torch.cat([private, common], dim=1))
            own = torch.einsum("nme,nmew->nmw", gates, choices)
        return of_task(own, task)


class CGC(PLE):
    """Customized gate control: one layer of PLE (Tang et al. 2020)."""

    def __init__(self, inner: int, outer: int, tasks: int, shared: int = 2, own: int = 1) -> None:
        super().__init__(inner, outer, tasks, 1, shared, own)


class CrossStitch(nn.Module):
    """A tower for each task, whose layers read mixtures of all towers (Misra et al. 2016)."""

    def __init__(self, inner: int, outer: int, tasks: int, layers: int = 2, keep: float = 0.9) -> None:
        super().__init__()
        widths = [inner, *[outer] * layers]
        self.towers = nn.ModuleList(Bank(tasks, c, w) for c, w in pairwise(widths))
        stitch = torch.eye(tasks) * keep + (1 - torch.eye(tasks)) * (1 - keep) / max(tasks - 1, 1)
        self.stitches = nn.Parameter(stitch.repeat(layers - 1, 1, 1))

    def forward(self, features: Tensor, task: Tensor) -> Tensor:
        x = self.towers[0](features)
        for tower, stitch in zip(list(self.towers)[1:], self.stitches, strict=True):
            x = tower(torch.einsum("st,ntw->nsw", stitch, F.gelu(x)))
        return of_task(x, task)


class MTAN(nn.Module):
    """One shared network, and for each task masks over the outputs of its layers (Liu, Johns and Davison 2019).

    A mask is one map of a layer's output and of the task's masked output of the layer before. The paper's masks are two maps
    and read the activation between a layer's convolutions, and a task's output is mapped from layer to layer by one network
    for all tasks.
    """

    def __init__(self, inner: int, outer: int, tasks: int, layers: int = 2) -> None:
        super().__init__()
        self.tasks = tasks
        widths = [inner, *[outer] * layers]
        self.shared = nn.ModuleList(Experts(1, c, w) for c, w in pairwise(widths))
        self.masks = nn.ModuleList(Bank(tasks, w if i == 0 else 2 * w, w) for i, w in enumerate(widths[1:]))
        self.outs = nn.ModuleList(Bank(tasks, w, w) for w in widths[1:])

    def forward(self, features: Tensor, task: Tensor) -> Tensor:
        x, seen = features, None
        for shared, mask, out in zip(self.shared, self.masks, self.outs, strict=True):
            x = shared(x)[:, 0]
            every = x[:, None].expand(-1, self.tasks, -1)
            attention = mask(every if seen is None else torch.cat([every, seen], dim=-1)).sigmoid()
            seen = out(attention * every)
        assert seen is not None
        return of_task(seen, task)


class LTB(nn.Module):
    """Learning to branch (Guo, Lee and Ulbricht 2020): every node of a layer chooses its parent, every task its last node.

    In training, choices are Gumbel-softmax draws at `temperature`; otherwise the likeliest one is taken.
    """

    def __init__(
        self, inner: int, outer: int, tasks: int, layers: int = 2, branches: int = 3, temperature: float = 1.0
    ) -> None:
        super().__init__()
        self.temperature = temperature
        widths = [inner, *[outer] * layers]
        self.nodes = nn.ModuleList(Bank(branches, c, w) for c, w in pairwise(widths))
        self.parents = nn.Parameter(torch.zeros(layers - 1, branches, branches))
        self.leaves = nn.Parameter(torch.zeros(tasks, branches))

    def choose(self, logits: Tensor) -> Tensor:
        if self.training:
            return F.gumbel_softmax(logits, tau=self.temperature, dim=-1)
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits)

    def forward(self, features: Tensor, task: Tensor) -> Tensor:
        x = self.nodes[0](features)
        for node, parents in zip(list(self.nodes)[1:], self.parents, strict=True):
            x = node(torch.einsum("se,new->nsw", self.choose(parents), F.gelu(x)))
        return torch.einsum("ne,new->nw", self.choose(self.leaves)[task], x)


SHARING: dict[str, Callable[..., nn.Module]] = {
    "hard": Hard, "mmoe": MMoE, "cgc": CGC, "ple": PLE, "cross_stitch": CrossStitch, "mtan": MTAN, "ltb": LTB,
    "dselect_k": DSelectK,
}  # fmt: skip
"""Modules by name, each called with (inner, outer, tasks)."""


def check_settings(name: str, settings: Mapping[str, Any], where: str) -> None:
    """Refuse settings that the module of that name does not have, or of another type (UserError)."""
    parameters = inspect.signature(SHARING[name]).parameters.values()
    known = {p.name: p.default for p in parameters if p.default is not p.empty}
    for key, value in settings.items():
        if key not in known:
            raise UserError(f"{where}.{key} is unknown to {name}; {closest(key, known)}")
        if isinstance(known[key], int):
            fits, must = type(value) is int and 1 <= value <= 1000, "a whole number from 1 to 1000"
        else:
            fits, must = type(value) in (int, float) and math.isfinite(value), "a finite number above 0"
            fits = fits and (value > 0 or (value == 0 and key == "keep"))
        if not fits:
            raise UserError(f"{where}.{key} is {value!r}; it must be {must}")
    experts = int(settings.get("experts", 2))
    if name == "dselect_k" and (experts < 2 or experts & (experts - 1)):
        raise UserError(
            f"{where}.experts is {experts}; dselect_k numbers them in binary: give a power of two, 2 at least (for one expert, "
            "which has no gate, take hard)"
        )
