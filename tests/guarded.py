"""`python -m pytest --guard`: the graph guard around whatever the tests train, also in processes that they start (`child`).

Three ways to look, each where nothing else guards already:

- a step of the loop (`PlainStep`) is watched as `guard: true` watches it;
- outside of the loop a window goes from the first forward of one of our models with gradients recorded to the end of backward;
- where an optimizer steps after such windows, every parameter that it owns should have got a gradient in them.

A test whose steps give a finding fails with the guard's report. What fails in autograd itself is the test's own business.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase as fnmatch
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import uuid4

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode

from omni.diagnostics import Finding, Guard, report
from omni.diagnostics.held import tensors_in
from omni.edit.mend import GradientTransform, Mend
from omni.encoder.whisper import WhisperEncoder
from omni.model.decoder import Decoder
from omni.model.speech_model import SpeechModel
from train.objective.objective import Objective
from train.trainer.step import GuardedStep, PlainStep

CHILDREN = "OMNI_GUARDED_TESTS"
"""Environment variable: the folder where processes that tests start leave what was looked at there."""

MODELS: tuple[type[nn.Module], ...] = (Objective, SpeechModel, Decoder, WhisperEncoder, Mend, GradientTransform)
"""Whose forward opens a window; of models within each other the outermost does."""


class Lookout:
    """Looks on while entered.

    Attributes:
        counts: since the last `take`, what was looked at: `steps` of the loop, `windows` (forward and backward passes outside
            of it), `updates` (steps of optimizers whose gradients were looked at).
        found: what the present test's steps gave, each mistake once.
        untrained: names (with `*`) of parameters to which the present test gives no gradient on purpose; optimizers may own
            them all the same.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.found: list[Finding] = []
        self.untrained: list[str] = []
        self.guards: dict[nn.Module, Guard] = {}
        self.open: dict[nn.Module, Any] = {}
        self.inside = self.guarded = 0
        self.stack = ExitStack()

    def __enter__(self) -> Lookout:
        patch = lambda owner, name, new: self.stack.enter_context(mock.patch.object(owner, name, new))  # noqa: E731
        patch(PlainStep, "__call__", self._train(PlainStep.__call__))
        patch(GuardedStep, "__call__", self._guard(GuardedStep.__call__))
        for kind in MODELS:
            patch(kind, "forward", self._forward(kind))
        patch(torch.autograd, "backward", self._backward(torch.autograd.backward))
        self.stack.callback(register_optimizer_step_pre_hook(self._updated).remove)
        return self

    def __exit__(self, *error: Any) -> None:
        self.take()
        self.stack.close()

    def take(self) -> tuple[list[Finding], dict[str, int]]:
        """What was found and what was looked at since the last call. What is still open had no backward: no verdict."""
        self._drop()
        self.guards.clear()
        found, self.found = self.found, []
        counts, self.counts = self.counts, {}
        return found, {**counts, "tests": 1, "findings": len(found)} if counts else counts

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _train(self, plain: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(plain)
        def train(take: PlainStep, step: Any, progress: float) -> None:
            if self.guarded or _is_seen_through():
                self._within(plain, take, step, progress)
                return
            self._drop()  # its backward is none of the loop's
            within = functools.partial(self._within, plain, take)
            watch = vars(take).setdefault("lookout", GuardedStep(within, take.module.module, take.optimizer, take.idle))
            self.found += watch(step, progress)
            self._count("steps")

        return train

    def _guard(self, plain: Callable[..., list[Finding]]) -> Callable[..., list[Finding]]:
        @functools.wraps(plain)
        def step(guard: GuardedStep, *args: Any) -> list[Finding]:
            self.guarded += 1
            try:
                return plain(guard, *args)
            finally:
                self.guarded -= 1

        return step

    def _within(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Do it without a window of its own."""
        self.inside += 1
        try:
            return work(*args, **kwargs)
        finally:
            self.inside -= 1

    # --- windows ------------------------------------------------------------------------------------------------------

    def _forward(self, kind: type[nn.Module]) -> Callable[..., Any]:
        plain = kind.forward

        @functools.wraps(plain)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return plain(module, *args, **kwargs)
            if self._is_new(module):
                guard = self.guards.setdefault(module, Guard(module))
                given = [t for _, t in tensors_in((args, kwargs)) if t.grad_fn is None]  # others come from parts before
                self.open[module] = guard.step((args, kwargs) if kind is Objective else given, last=False)
                self.open[module].__enter__()
            return self._within(plain, module, *args, **kwargs)

        return forward

    def _is_new(self, module: nn.Module) -> bool:
        """Whether a forward of this model starts something that backward may end; FSDP2 gathers a root before its forward."""
        if (
            isinstance(module, FSDPModule)
            or self.inside
            or module in self.open
            or not torch.is_grad_enabled()
            or _is_seen_through()
            or _in_backward()
        ):
            return False
        learning = [p for p in module.parameters() if p.requires_grad]
        return any(type(p) is nn.Parameter and p.device.type != "meta" for p in learning)

    def _backward(self, plain: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(plain)
        def backward(*args: Any, **kwargs: Any) -> None:
            if _in_backward():  # of a reentrant checkpoint
                plain(*args, **kwargs)
                return
            try:
                plain(*args, **kwargs)
            except BaseException:
                self._drop()
                raise
            self._close()

        return backward

    def _close(self) -> None:
        while self.open:
            module, step = self.open.popitem()
            self._count("windows")
            self._note(self.guards[module], step)

    def _drop(self) -> None:
        while self.open:
            self.open.popitem()[1].__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)

    def _updated(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for module, guard in self.guards.items():
            if self.inside or module in self.open or not guard.arrived & owned:
                continue
            named = module.named_parameters()
            guard.idle = {id(p): p for name, p in named if id(p) not in owned or self._is_untrained(name)}
            step = guard.step()
            step.__enter__()
            self._count("updates")
            self._note(guard, step)

    def _is_untrained(self, name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in self.untrained)

    def _note(self, guard: Guard, step: Any) -> None:
        known = {finding.key for finding in guard.findings}
        step.__exit__(None, None, None)
        self.found += [finding for finding in guard.findings if finding.key not in known]


@contextmanager
def child() -> Iterator[None]:
    """Look on in a process that a test has started, where pytest looks on; a finding ends it with exit code 3."""
    place = os.environ.get(CHILDREN)
    if place is None:
        yield
        return
    with Lookout() as looking:
        try:
            yield
        finally:
            found, counts = looking.take()
            (Path(place) / f"{uuid4().hex}.json").write_text(json.dumps(counts))
    if found:
        print(f"the graph guard found\n{report(found)}", file=sys.stderr)
        sys.exit(3)


def children(place: Path) -> dict[str, int]:
    """What was looked at in the processes that left their counts there."""
    counts: dict[str, int] = {}
    for file in place.glob("*.json"):
        for name, number in json.loads(file.read_text()).items():
            counts[name] = counts.get(name, 0) + number
    return counts


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _is_seen_through() -> bool:
    """Whether something sees every operation, a trace or a plan on paper: the guard's copies would be part of it."""
    return _get_current_dispatch_mode() is not None
