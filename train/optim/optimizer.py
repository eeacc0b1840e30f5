"""Optimizers: selects the trainable parameters, sorts them into groups, trains each group by its rule, and averages weights;
the budget of a run and the learning rate over it.

The registry `RULES` has the rules: AdamW (Loshchilov and Hutter 2019) for every parameter, optionally with its state in 8 bits,
or Muon (Jordan et al. 2024) for the hidden matrices and AdamW for the rest. Several rules make one `Optimizers`, which is
stepped, clipped, saved and resumed like one optimizer.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from omni.errors import UserError
from omni.model.linears import tied_names
from omni.utils.arguments import match_names
from omni.utils.private import foreach_lerp_
from omni.utils.process import silence
from train.config.sections import BudgetConfig, GroupConfig, OptimizerConfig, ScheduleConfig
from train.console.progress import OPEN

Params = list[tuple[str, nn.Parameter]]

TABLES = ("*embedding*", "*_head.*")
"""Names of matrices that AdamW trains where the others are Muon's."""


class UncapturedAdamW(torch.optim.AdamW):
    """AdamW that does not ask whether a CUDA graph is captured: the question opens a GPU beside a run on the CPU."""

    def _accelerator_graph_capture_health_check(self) -> None: ...

    _cuda_graph_capture_health_check = _accelerator_graph_capture_health_check  # in torch 2.11


def _paged_adamw_8bit(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW with its state in 8 bits (Dettmers et al. 2022), in memory that a GPU may move to the host."""
    silence("bitsandbytes.backends.cpu.ops")
    from bitsandbytes.optim import PagedAdamW8bit

    class PagedAdamW(PagedAdamW8bit):
        _cpu_paged_warned = True  # it would warn that a CPU's memory is not paged
        found_inf: Tensor | None = None

        @torch.no_grad()
        def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
            if self.found_inf is None or not bool(self.found_inf):
                super().step(closure)

        def update_step(self, group: Any, p: Tensor, gindex: int, pindex: int) -> None:
            state = self.state[p]  # the step count is stored as a tensor, like all state; bitsandbytes needs a number
            state["step"] = int(state["step"])
            super().update_step(group, p, gindex, pindex)
            state["step"] = torch.tensor(float(state["step"]))

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Paged optimizers are not supported on CPU")
        return PagedAdamW(groups, lr=config.lr, betas=config.betas)


RULES: Mapping[str, Callable[[list[dict[str, Any]], OptimizerConfig], torch.optim.Optimizer]] = {
    "adamw": lambda groups, config: UncapturedAdamW(groups, lr=config.lr, betas=config.betas, fused=True),
    "muon": lambda groups, config: BatchedMuon(groups, lr=config.muon_lr),
    "paged_adamw_8bit": _paged_adamw_8bit,
}
"""Functions that make an optimizer of parameter groups, by name of the rule."""

STATE_KEYS = {"adamw": "exp_avg", "muon": "momentum_buffer", "paged_adamw_8bit": "state1"}
"""An entry that each rule's state of a parameter has, and that of the others has not."""


class Optimizers(torch.optim.Optimizer):
    """Several rules as one optimizer: every parameter group has a `rule`, and all of them share one state.

    `skip` is 1 where the next step must leave weights and state as they are, otherwise 0, or None for 0: a tensor on the
    device, so that the host does not wait for it.
    """

    skip: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], config: OptimizerConfig) -> None:
        super().__init__(groups, {})
        self.inner: dict[str, torch.optim.Optimizer] = {}
        for rule in dict.fromkeys(g["rule"] for g in self.param_groups):
            # The inner optimizer adds its defaults to these same dictionaries; its state is ours.
            self.inner[rule] = inner = RULES[rule]([g for g in self.param_groups if g["rule"] == rule], config)
            inner.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for rule, inner in self.inner.items():
            inner.param_groups = [g for g in self.param_groups if g["rule"] == rule]
            inner.state = self.state

    @torch.no_grad()
    def allocate(self, p: nn.Parameter) -> None:
        """Make the state of a parameter as its rule does at a first step, where the rule can be asked to (bitsandbytes')."""
        for inner in [inner for inner in self.inner.values() if hasattr(inner, "init_state")]:
            for number, group in enumerate(inner.param_groups):
                for index in [i for i, own in enumerate(group["params"]) if own is p]:
                    inner.init_state(group, p, number, index)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for inner in self.inner.values():
            inner.found_inf = self.skip  # type: ignore[attr-defined]  # torch's fused optimizers read this attribute
            inner.step()


def set_trainable(model: nn.Module, patterns: Sequence[str]) -> dict[str, str]:
    """Make the parameters that a pattern names trainable, and freeze the others; returns second names of tied parameters
    (`omni.model.linears.tied_names`), by which patterns may name them too. UserError where a pattern names no parameter
    (with the closest names), or none is trainable."""
    also = tied_names(model)
    chosen = match_names(patterns, [name for name, _ in model.named_parameters()], "trainable", also=also)
    if not chosen:
        raise UserError("trainable is empty: no parameter would be trained; give patterns such as '*' or 'projector.*'")
    for name, p in model.named_parameters():
        if name in chosen and not p.is_floating_point():
            raise UserError(
                f"trainable names {name}, which is quantised and cannot be trained; take it out of lora.quantize_targets"
            )
        p.requires_grad_(name in chosen)
    return also


def parameter_groups(params: Params, config: OptimizerConfig, also: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Sort parameters into groups of one rule, learning rate and weight decay; `also` as `set_trainable` gives it.

    The first of `config.groups` whose pattern names a parameter decides. Norms and biases (also stacks of them, as multitask
    projectors have) are neither decayed nor trained by Muon. UserError where a pattern names none, or gives a learning rate
    for a rule that none of its parameters has.
    """
    names = [name for name, _ in params]
    owner: dict[str, GroupConfig] = {}
    for group in reversed(config.groups):
        owner.update(dict.fromkeys(match_names([group.pattern], names, "optimizer.groups", also=also), group))
    exclude = match_names(TABLES, names, "tables", strict=False, also=also)
    groups: dict[tuple[str, float, float], dict[str, Any]] = {}
    used: set[tuple[str, str]] = set()  # (pattern, learning rate's key) pairs that at least one parameter uses
    for name, p in params:
        matrix = p.ndim >= 2 and name.rpartition(".")[2] != "bias"
        own = owner.get(name, GroupConfig(pattern=name))
        rule = own.rule or config.name
        if rule == "muon" and (not matrix or p.ndim != 2 or name in exclude):
            rule = "adamw"
        key = "muon_lr" if rule == "muon" else "lr"
        lr = getattr(config if getattr(own, key) is None else own, key)
        used.add((own.pattern, key))
        decay = 0.0 if not matrix else config.weight_decay if own.weight_decay is None else own.weight_decay
        members = {"params": [], "rule": rule, "lr": lr, "base_lr": lr, "weight_decay": decay}
        groups.setdefault((rule, lr, decay), members)["params"].append(p)
    for group in config.groups:
        for key, other in (("lr", "muon_lr"), ("muon_lr", "lr")):
            if getattr(group, key) is not None and (group.pattern, key) not in used and (group.pattern, other) in used:
                raise UserError(
                    f"optimizer.groups {group.pattern!r} gives {key} {getattr(group, key):g}, but all of these parameters "
                    f"are trained by {'Muon' if key == 'lr' else 'AdamW'}: give {other} instead"
                )
    return list(groups.values())


def build_optimizer(
    params: Params, config: OptimizerConfig, precision: str = "32-true", also: Mapping[str, str] | None = None
) -> Optimizers:
    """Build the optimizer over the trainable parameters; Muon's iteration runs in bf16 where the run's precision is."""
    optimizer = Optimizers(parameter_groups(params, config, also), config)
    for inner in optimizer.inner.values():
        if isinstance(inner, BatchedMuon):
            inner.half = precision.startswith("bf16")
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set every group's learning rate to its own base rate times the schedule's factor."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor


def describe(groups: Iterable[Mapping[str, Any]]) -> str:
    """Describe the groups in one line: rule, learning rate, weight decay and number of parameters of each."""
    sizes = [(g, sum(p.numel() for p in g["params"]) / 1e6) for g in groups]
    return "; ".join(f"{g['rule']} lr {g['base_lr']:g} decay {g['weight_decay']:g}: {size:.2f} M" for g, size in sizes)


class BatchedMuon(torch.optim.Muon):
    """`torch.optim.Muon` with all matrices of one shape, also transposed, orthogonalised in one batched product.

    In bf16, as torch's own, but on the CPU in fp32 unless `half`: most processors multiply that faster. Where `found_inf` is
    1, a step changes neither weights nor state.
    """

    found_inf: Tensor | None = None
    half = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        keep = None if self.found_inf is None else 1 - self.found_inf.double()  # in float64, as exact as a Python number
        for group in self.param_groups:
            lr, decay, momentum = group["lr"], group["weight_decay"], group["momentum"]
            shrink = 1 - lr * decay * (1.0 if keep is None else keep)
            shapes: dict[tuple[int, int], list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                buffer = state["momentum_buffer"]
                grad = p.grad if keep is None else torch.where(keep > 0, p.grad, buffer)
                buffer.lerp_(grad, 1 - momentum)
                update = grad.lerp(buffer, momentum) if group["nesterov"] else buffer
                shapes[min(p.shape), max(p.shape)].append((p, update))
            for pairs in shapes.values():
                wide = torch.stack([u if u.shape[0] <= u.shape[1] else u.mT for _, u in pairs])
                wide = orthogonalize(wide, group["ns_coefficients"], group["ns_steps"], group["eps"], self.half)
                if keep is not None:
                    wide = wide * keep
                for (p, _), u in zip(pairs, wide, strict=True):
                    p.mul_(shrink)
                    step = u if p.shape[0] <= p.shape[1] else u.mT
                    p.add_(step.to(p.dtype), alpha=-lr * math.sqrt(max(1.0, p.shape[0] / p.shape[1])))


def orthogonalize(
    matrices: Tensor, coefficients: Sequence[float] = (3.4445, -4.7750, 2.0315), steps: int = 5, eps: float = 1e-7,
    half: bool = False,
) -> Tensor:  # fmt: skip
    """Run the quintic Newton-Schulz iteration X <- a X + (b G + c G^2) X with G = X X^T on matrices [N, m, n], m <= n.

    Brings every singular value near 1. Coefficients: K. Jordan, "Muon" (2024). fp32 on the CPU unless `half`, else bf16.
    """
    a, b, c = coefficients
    x = matrices.to(torch.float32 if matrices.device.type == "cpu" and not half else torch.bfloat16)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Average:
    """Exponential moving average of the trainable weights, in fp32; sharded where they are.

    The decay at step n is at most (1 + n) / (10 + n): early on the average follows faster, and soon forgets the random start.
    """

    def __init__(self, params: Iterable[tuple[str, nn.Parameter]], decay: float) -> None:
        self.decay = decay
        self.params = dict(params)
        self.values = {name: p.detach().float().clone() for name, p in self.params.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average with the weights after optimizer step number `step` (counted from 1)."""
        weight = 1 - min(self.decay, (1 + step) / (10 + step))
        params, values = [p.detach() for p in self.params.values()], [self.values[name] for name in self.params]
        if all(p.dtype == torch.float32 and not isinstance(p, DTensor) for p in params):
            foreach_lerp_(values, params, weight)
            return
        for value, p in zip(values, params, strict=True):
            value.lerp_(p.float(), weight)


# --- the budget, and the learning rate over it, as pure functions of the step and of the time used --------------------------


def used(budget: BudgetConfig, step: int, seconds: float, reached: bool = False) -> float:
    """Share of the budget, 0 to 1, that `step` steps in `seconds` have used; 1 where `budget.until` is reached."""
    by_steps = step / budget.steps if budget.steps is not None else 0.0
    by_time = seconds / (60 * budget.minutes) if budget.minutes is not None else 0.0
    expected = min(OPEN, step / budget.expected) if budget.expected is not None else 0.0
    return 1.0 if reached else min(1.0, max(by_steps, by_time, expected))


def learning_rate(schedule: ScheduleConfig, budget: BudgetConfig, step: int, seconds: float) -> float:
    """Factor of the learning rate for the optimizer step with index `step` (from 0).

    The warm-up rises linearly to 1 over its steps; the schedule then runs over the rest of a budget in steps, or over the
    whole of a budget in minutes (as the duration of the warm-up is not known in advance). WSD: Hu et al. 2024 (MiniCPM).
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    start = min(1.0, schedule.warmup_steps / budget.steps) if budget.steps is not None else 0.0
    left = max(1e-9, 1.0 - start)
    x = min(1.0, max(0.0, used(budget, step, seconds) - start) / left)
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "linear":
        shape = 1.0 - x
    elif schedule.name == "cosine":
        shape = 0.5 * (1.0 + math.cos(math.pi * x))
    else:
        shape = min(1.0, (1.0 - x) / schedule.decay)
    return schedule.final + (1.0 - schedule.final) * shape


def check_larger(old: BudgetConfig, new: BudgetConfig) -> None:
    """Refuse a budget that is smaller in any way than the one that a run was started with (UserError)."""
    for key in ("steps", "minutes"):
        before, now = getattr(old, key), getattr(new, key)
        if now is not None and (before is None or now < before):
            limit = "without such a limit" if before is None else f"with {before:g}"
            raise UserError(
                f"budget.{key} is {now:g}, but the run was started {limit}: --resume extend makes a budget larger; give more, "
                "or say --resume force"
            )


def extension(
    schedule: ScheduleConfig, old: BudgetConfig, new: BudgetConfig, step: int, seconds: float, rate: float
) -> str | None:
    """Describe in one line how the learning rate (of that peak) changes where the budget grows after `step` steps; None for
    the same budget."""
    if old == new:
        return None
    parts = [f"{new.steps} steps"] if new.steps is not None else []
    parts += [f"{new.minutes:g} minutes"] if new.minutes is not None else []
    before, now = (rate * learning_rate(schedule, budget, step, seconds) for budget in (old, new))
    change = f"stays {now:.3g}" if before == now else f"goes from {before:.3g} to {now:.3g}"
    return f"schedule {schedule.name} made again for {' or '.join(parts)}; at step {step} the learning rate {change}"


def due(
    step: int, seconds: float, last_step: int, last_seconds: float, every_steps: int | None, every_minutes: float | None
) -> bool:
    """True where an action that repeats every `every_steps` or `every_minutes` is due, given when it last happened."""
    if every_steps is not None and step // every_steps > last_step // every_steps:
        return True
    return every_minutes is not None and seconds - last_seconds >= 60 * every_minutes
