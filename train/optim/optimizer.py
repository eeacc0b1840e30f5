"""Optimizers: selects the trainable parameters, sorts them into groups, and trains each group by its rule.

The registry `RULES` has the rules: AdamW (Loshchilov and Hutter 2019) for every parameter, optionally with its state in 8 bits,
or Muon (Jordan et al. 2024) for the hidden matrices and AdamW for the rest. Several rules make one `Optimizers`, which is
stepped, clipped, saved and resumed like one optimizer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from omni.errors import UserError
from omni.model.linears import tied_names
from omni.utils.patterns import NONE, match_names
from omni.utils.quiet import silence_bitsandbytes
from train.config.sections import GroupConfig, OptimizerConfig
from train.optim.muon import BatchedMuon

Params = list[tuple[str, nn.Parameter]]


class UncapturedAdamW(torch.optim.AdamW):
    """AdamW that does not ask whether a CUDA graph is captured: the question opens a GPU beside a run on the CPU."""

    def _accelerator_graph_capture_health_check(self) -> None: ...

    _cuda_graph_capture_health_check = _accelerator_graph_capture_health_check  # in torch 2.11


def _adamw(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    return UncapturedAdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def _muon(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    return BatchedMuon(
        groups, lr=config.muon_lr, momentum=config.muon_momentum, ns_steps=config.muon_steps, adjust_lr_fn=config.muon_scale
    )


def _paged_adamw_8bit(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW with its state in 8 bits (Dettmers et al. 2022), in memory that a GPU may move to the host."""
    silence_bitsandbytes()
    try:
        from bitsandbytes.optim import PagedAdamW8bit
    except ImportError as error:
        raise UserError("optimizer paged_adamw_8bit needs the package bitsandbytes: pip install bitsandbytes") from error

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
        return PagedAdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)


Rules = Mapping[str, Callable[[list[dict[str, Any]], OptimizerConfig], torch.optim.Optimizer]]
"""Functions that make an optimizer of parameter groups, by name of the rule."""

RULES: Rules = {
    "adamw": _adamw,
    "muon": _muon,
    "paged_adamw_8bit": _paged_adamw_8bit,
}

STATE_KEYS = {"adamw": "exp_avg", "muon": "momentum_buffer", "paged_adamw_8bit": "state1"}
"""An entry that each rule's state of a parameter has, and that of the others has not."""


class Optimizers(torch.optim.Optimizer):
    """Several rules as one optimizer: every parameter group has a `rule`, and all of them share one state.

    `skip` is 1 where the next step must leave weights and state as they are, otherwise 0, or None for 0: a tensor on the
    device, so that the host does not wait for it.
    """

    skip: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], config: OptimizerConfig, rules: Rules = RULES) -> None:
        super().__init__(groups, {})
        self.inner: dict[str, torch.optim.Optimizer] = {}
        for rule in dict.fromkeys(g["rule"] for g in self.param_groups):
            # The inner optimizer adds its defaults to these same dictionaries; its state is ours (`_share`).
            self.inner[rule] = rules[rule]([g for g in self.param_groups if g["rule"] == rule], config)
        self._share()

    def _share(self) -> None:
        for rule, inner in self.inner.items():
            inner.param_groups = [g for g in self.param_groups if g["rule"] == rule]
            inner.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def allocate(self, p: nn.Parameter) -> None:
        """Make the state of a parameter as its rule does at a first step, where the rule can be asked to (bitsandbytes')."""
        for inner in self.inner.values():
            init: Callable[..., None] | None = getattr(inner, "init_state", None)
            for number, group in enumerate(inner.param_groups if init is not None else ()):
                place = next((i for i, own in enumerate(group["params"]) if own is p), None)
                if place is not None and init is not None:
                    init(group, p, number, place)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for inner in self.inner.values():
            inner.found_inf = self.skip  # type: ignore[attr-defined]  # torch's fused optimizers read this attribute
            inner.step()


def set_trainable(model: nn.Module, patterns: Sequence[str]) -> dict[str, str]:
    """Make the parameters that a pattern names trainable, and freeze the others.

    Patterns may name a tied text head as head or as embedding table.

    Returns:
        second names of tied parameters (`omni.model.linears.tied_names`), by which patterns may name them too.

    Raises:
        UserError: a pattern names no parameter (with the closest names), or no parameter is trainable.
    """
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


def parameter_groups(params: Params, config: OptimizerConfig, also: Mapping[str, str] = NONE) -> list[dict[str, Any]]:
    """Sort parameters into groups of one rule, learning rate and weight decay.

    The first of `config.groups` whose pattern names a parameter decides; settings that it leaves open are the optimizer's own.
    Norms and biases are neither decayed nor trained by Muon: parameters of fewer than two dimensions, and stacks of biases, as
    multitask projectors have.

    Args:
        also: second names of parameters, as `set_trainable` gives them.

    Raises:
        UserError: a pattern names no parameter, or gives a learning rate for a rule that none of its parameters has.
    """
    names = [name for name, _ in params]
    owner: dict[str, GroupConfig] = {}
    for group in reversed(config.groups):
        owner.update(dict.fromkeys(match_names([group.pattern], names, "optimizer.groups", also=also), group))
    exclude = match_names(config.muon_exclude, names, "optimizer.muon_exclude", strict=False, also=also)
    groups: dict[tuple[str, float, float], dict[str, Any]] = {}
    used: set[tuple[str, str]] = set()  # (pattern, learning rate's key) pairs that at least one parameter uses
    for name, p in params:
        matrix = p.ndim >= 2 and name.rpartition(".")[2] != "bias"
        own = owner.get(name, GroupConfig(pattern=name))
        rule = own.rule or config.name
        if rule not in RULES:
            raise UserError(f"optimizer rule {rule!r} is unknown; known: {', '.join(RULES)}")
        if rule == "muon" and (not matrix or p.ndim != 2 or name in exclude):
            rule = "adamw"
        if rule == "muon" and isinstance(p, DTensor):
            raise UserError(
                "optimizer muon with fabric.strategy fsdp: Muon needs whole matrices, and fsdp gives each process a slice; "
                "use optimizer.name adamw, or strategy ddp"
            )
        key = "muon_lr" if rule == "muon" else "lr"
        lr = getattr(config if getattr(own, key) is None else own, key)
        used.add((own.pattern, key))
        decay = own.weight_decay if own.weight_decay is not None else config.weight_decay
        decay = decay if matrix else 0.0
        members = groups.setdefault(
            (rule, lr, decay),
            {"params": [], "rule": rule, "lr": lr, "base_lr": lr, "weight_decay": decay},
        )
        members["params"].append(p)
    for group in config.groups:
        for key, other in (("lr", "muon_lr"), ("muon_lr", "lr")):
            if getattr(group, key) is not None and (group.pattern, key) not in used and (group.pattern, other) in used:
                raise UserError(
                    f"optimizer.groups {group.pattern!r} gives {key} {getattr(group, key):g}, but all of these parameters "
                    f"are trained by {'Muon' if key == 'lr' else 'AdamW'}: give {other} instead"
                )
    return list(groups.values())


def build_optimizer(
    params: Params,
    config: OptimizerConfig,
    precision: str = "32-true",
    also: Mapping[str, str] = NONE,
    rules: Rules = RULES,
) -> Optimizers:
    """Build the optimizer of a run over the trainable parameters (`also` as in `parameter_groups`).

    Muon's iteration runs in bf16 where the run's precision is bf16.
    """
    optimizer = Optimizers(parameter_groups(params, config, also), config, rules)
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
    parts = [
        f"{g['rule']} lr {g['base_lr']:g} decay {g['weight_decay']:g}: {sum(p.numel() for p in g['params']) / 1e6:.2f} M"
        for g in groups
    ]
    return "; ".join(parts)
