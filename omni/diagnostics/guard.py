"""The guard, which watches steps of any PyTorch training for mistakes with graphs, gradients and caches."""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from omni.diagnostics.checks import expectation, foreign_forwards
from omni.diagnostics.diagnose import (
    UNOWNED,
    Scene,
    at_start,
    diagnose,
    fingerprint,
    kind_of,
    missing_gradients,
    parameters_of,
    traced_changes,
)
from omni.diagnostics.findings import Finding, GraphError, report, shortlist
from omni.diagnostics.held import MODULE_FIELDS, held_by, held_in, version_of
from omni.diagnostics.trace import Trace, next_number, replaced, watched_checkpoints
from omni.utils.private import base_of, own_buffers, reset_reducer

MOST_BYTES = 1 << 28  # of buffers and caches, that are copied at the start of every step; further ones are not restored
PATIENCE = 32  # steps that a parameter which has received gradients may go without one
HINT = "For the line of each culprit, repeat the step: guard.rerun(step), where step() does what failed."

Restore = Callable[[], None]


class Guard:
    """Watches steps and collects findings (docs/gradients.md); nothing is kept between steps.

    Of a model with checkpointed parts steps 2, 4, 8 and so on are traced, to compare them with their repetition in backward.

    Args:
        model: the model whose state and parameters are checked; several in one `nn.ModuleList`.
        optimizer: one or several (of a wrapper its attribute `optimizer`); their steps mark complete gradients, and their
            parameters count as owned.
        idle: parameters that need no gradient although they are trainable.

    Attributes:
        findings: all findings so far, each mistake once.
        failed: autograd failed in the last step.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        idle: Iterable[nn.Parameter] = (),
    ) -> None:
        optimizers = [] if optimizer is None else optimizer if isinstance(optimizer, Sequence) else [optimizer]
        self.model = model
        self.optimizers: list[torch.optim.Optimizer] = [getattr(inner, "optimizer", inner) for inner in optimizers]
        self.idle = {id(p): p for p in idle}
        self.findings: list[Finding] = []
        self.failed = self.has_checkpoints = False
        self.arrived: set[int] = set()
        self.waiting: dict[int, int] = {}
        self.start: Restore | None = None
        self.batch: Any = None
        self.active: _Step | None = None
        self.recent: list[Finding] = []
        self.steps = 0

    def step(self, batch: Any = None, *, last: bool = True, trace: bool = False) -> _Step:
        """Context manager around forward and backward, optionally also around the optimizer's step.

        Args:
            batch: inputs of the step (tensors, and containers and objects that hold some), which are checked too.
            last: False for a micro-batch that others follow before gradients are complete.
            trace: record every operation.

        Raises:
            GraphError: autograd failed inside; with the original message and the diagnosis.
        """
        return _Step(self.model, batch, sys._getframe(1), guard=self, last=last, traced=trace)

    def rerun(self, step: Callable[[], Any], batch: Any = None) -> list[Finding]:
        """Repeats the last step under a full trace; returns its findings, which are also added to `findings`.

        It starts from the random state, buffers and attributes that the last step started from, where it found something, with
        the present weights and optimizer; afterwards all is restored. A failed step is repeated without DDP's exchange of
        gradients; under FSDP2 all processes must repeat it together.

        Args:
            step: does what the last step did; it may enter `guard.step` itself.
        """
        batch = self.batch if batch is None else batch
        start, failed, recent = self.start, self.failed, {f.key for f in self.recent}
        before, self.findings = self.findings, [f for f in self.findings if f.key not in recent]
        watched = _Step(self.model, batch, sys._getframe(1), step, guard=self, traced=True)
        try:
            with restored(self.model, batch, self.optimizers, failed), alone() if failed else nullcontext():
                if start is not None:
                    start()
                with suppress(GraphError), watched:
                    step()
        finally:
            self.start, self.failed = start, failed
            kinds = {finding.kind for finding in watched.findings}
            # Findings of the trace replace the vaguer ones from before; a step sees only some of the patches.
            self.add(f for f in before if f.kind not in kinds or f.kind == "patch")
        return watched.findings

    def run(self, step: Callable[[], Any], batch: Any = None, *, trace: bool = False) -> Any:
        """Runs one step; where autograd fails, repeats it under a full trace and raises the complete diagnosis.

        Args:
            trace: trace the step itself: some mistakes give wrong gradients and no error.
        """
        try:
            with _Step(self.model, batch, sys._getframe(1), step, guard=self, traced=trace):
                return step()
        except GraphError as error:
            cause, findings = error.__cause__, error.findings
            with suppress(Exception):  # the cause is what counts
                findings = findings if trace else self.rerun(step, batch) or findings
            raise GraphError(str(cause), findings) from cause

    def expect_changed(self, module: nn.Module, tensors: Any = None) -> AbstractContextManager[None]:
        """Context manager around one forward that checks that a patch of this module takes part in it.

        Args:
            tensors: tensors that the patch put in; the module's own parameters by default. Where the module has hooks or a
                replaced `forward`, it is also expected to be called.
        """
        return expectation(self.add, self.names(), module, tensors)

    def report(self) -> str:
        return report(self.findings)

    def add(self, findings: Iterable[Finding]) -> list[Finding]:
        """Adds the findings that are new; returns the given ones, each once."""
        added = list({finding.key: finding for finding in findings}.values())
        placed = {finding.key[:3] for finding in added if finding.line is not None}
        self.findings = [f for f in self.findings if f.line is not None or f.key[:3] not in placed]
        known = {finding.key for finding in self.findings}
        self.findings += [finding for finding in added if finding.key not in known]
        return added

    def names(self) -> dict[int, str]:
        """Paths of parameters and modules by id."""
        named = [] if self.model is None else [*self.model.named_modules(), *self.model.named_parameters()]
        return {id(member): path for path, member in named}

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Trainable parameters by path; those that only the optimizer has are numbered."""
        numbered = [(f"parameter {i} of the optimizer", p) for i, p in enumerate(parameters_of(self.optimizers).values())]
        named = numbered if self.model is None else self.model.named_parameters()
        return [(name, p) for name, p in named if p.requires_grad and not is_lazy(p) and p.numel()]


@dataclass(eq=False, kw_only=True)
class _Step(Scene):
    """One step of a guard, as a context manager; `inner` within another one, as where a repeated step has its own `guard.step`.

    `loose` has the parameters that no optimizer owns, with their state at the start: they may be written by other means (a copy
    in a wider type is an optimizer's).
    """

    guard: Guard
    last: bool = True
    traced: bool = False
    findings: list[Finding] = field(default_factory=list)
    stepped: list[torch.optim.Optimizer] = field(default_factory=list)
    stack: ExitStack = field(default_factory=ExitStack)
    inner: bool = False
    named: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    loose: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def __enter__(self) -> _Step:
        guard = self.guard
        self.inner = guard.active is not None
        if self.inner:
            return self
        guard.active, guard.batch, guard.failed = self, self.batch, False
        guard.steps += self.last
        is_due = guard.steps > 1 and guard.steps & (guard.steps - 1) == 0
        self.traced = self.traced or (guard.has_checkpoints and self.last and is_due)
        reshard(self.model)
        guard.start = snapshot(self.model, self.batch)
        self.names, self.named, self.first = guard.names(), guard.parameters(), next_number()
        self.held = [(h, h.tensor.grad_fn, version_of(h.tensor)) for h in self.now()]
        self.held += [(h, None, -1) for h in held_by(self.model, parameters=True) if h.tensor.is_inference()]
        self.findings += foreign_forwards(self.model)
        owned = parameters_of(guard.optimizers).keys() | guard.idle.keys()
        self.loose = {name: fingerprint(p) for name, p in self.named if guard.optimizers and id(p) not in owned}
        if self.traced:
            self.trace = Trace({id(p): name for name, p in self.named}, self.first)
        hooks = [p.register_post_accumulate_grad_hook(self._note_arrival) for _, p in self.named]
        for hook in [*hooks, *(optimizer.register_step_pre_hook(self._note_step) for optimizer in guard.optimizers)]:
            self.stack.callback(hook.remove)
        checkpoints = watched_checkpoints(self.findings.append, self.trace, self.model, self.names)
        self.parts = self.stack.enter_context(checkpoints)
        if self.trace is not None:
            self.stack.enter_context(self.trace.running())
        return self

    def _note_arrival(self, p: Tensor) -> None:
        if p.grad is not None:  # a backward may give no gradient
            self.guard.arrived.add(id(p))

    def _note_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.stepped.append(optimizer)
        self._note_gradients()

    def _note_gradients(self) -> None:
        """Notes gradients that came by other means than backward, or before this step started; the zeros of
        `zero_grad(set_to_none=False)` are none, once other parameters received theirs."""
        arrived = self.guard.arrived
        late = [p for _, p in self.named if p.grad is not None and id(p) not in arrived]
        arrived |= {id(p) for p in late if not arrived or type(p) is not nn.Parameter or bool(p.grad.any())}  # type: ignore[union-attr]

    def _is_intermittent(self, p: nn.Parameter) -> bool:
        """Whether a parameter without gradient has received one lately: experts and tasks do not take part in every step."""
        guard, i = self.guard, id(p)
        if i in guard.arrived:
            guard.waiting[i] = 0
        elif i in guard.waiting:
            guard.waiting[i] += 1
        return 0 < guard.waiting.get(i, 0) <= PATIENCE

    def _check_gradients(self) -> None:
        """Finds missing gradients when the step is over; several backwards and optimizers in it count as one step."""
        guard = self.guard
        self._note_gradients()
        arrived, stepped = guard.arrived, parameters_of(self.stepped)
        spared = guard.idle.keys() | (parameters_of(guard.optimizers).keys() - stepped.keys() if stepped else set())
        explained = {name for f in self.findings if f.kind == "reentrant" for name in f.tensor.split(", ")}
        wanted = [(name, p) for name, p in self.named if id(p) not in spared and not self._is_intermittent(p)]
        lost = [(name, p) for name, p in wanted if p.requires_grad and id(p) not in arrived and name not in explained]
        if self.stepped or arrived:
            self.findings += missing_gradients(self, lost)
            loose = [(name, p) for name, p in self.named if name in self.loose and id(p) in arrived]
            names = [name for name, p in loose if not stepped or fingerprint(p) == self.loose[name]]
            text = f"{len(names)} parameters receive a gradient, but no optimizer owns them: they never change"
            self.findings += [Finding("not_owned", text, UNOWNED, shortlist(names))] if names else []
        arrived.clear()

    def __exit__(self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.inner:
            return
        guard = self.guard
        guard.active = None
        self.stack.close()
        try:
            if error is None:
                start = at_start(self)
                if self.last or self.stepped:
                    self._check_gradients()
                self.findings = guard.recent = guard.add([*start, *self.findings, *traced_changes(self)])
                guard.has_checkpoints = bool(self.parts)
                if not self.findings:
                    guard.start = None
                return
            guard.arrived.clear()
            if not isinstance(error, RuntimeError) or isinstance(error, GraphError) or kind_of(error) is None:
                return
            guard.failed = True
            self.findings = guard.recent = guard.add([*at_start(self), *self.findings, *diagnose(self, error)])
            raise GraphError(str(error), self.findings, "" if self.traced else HINT) from error
        finally:
            self.later.clear()
            self.held.clear()
            if self.trace is not None:
                self.trace.forget()
            self.frame = None


# --- what a repeated step starts from, and leaves -----------------------------------------------------------------------


def snapshot(model: nn.Module | None, batch: Any = None) -> Restore:
    """Copies random states, and contents and graphs of a model's buffers and attributes and of a batch's tensors; returns what
    puts them back."""
    states: list[tuple[Callable[[Any], Any], Any]] = [(torch.set_rng_state, torch.get_rng_state())]
    states.append((random.setstate, random.getstate()))
    if torch.cuda.is_initialized():
        states.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    if (numpy := sys.modules.get("numpy")) is not None:
        states.append((numpy.random.set_state, numpy.random.get_state()))
    modules = []
    for module in model.modules() if model is not None else ():
        own = {k: v for k, v in vars(module).items() if k not in MODULE_FIELDS}
        containers = [(v, copy.copy(v)) for v in own.values() if type(v) in (list, dict, set, deque)]
        modules.append((module, own, dict(own_buffers(module)), containers))
    values: list[tuple[Tensor, Tensor, Any]] = []
    room = MOST_BYTES
    for tensor in (held.tensor for held in (*held_by(model), *held_in(batch, "batch"))):
        room -= tensor.nbytes
        if room >= 0 and not tensor.is_inference():
            values.append((tensor, tensor.detach().clone(), tensor.grad_fn))

    @torch.no_grad()
    def restore() -> None:
        for put, state in states:
            put(state)
        for module, own, buffers, containers in modules:
            for name in [k for k in vars(module) if k not in MODULE_FIELDS and k not in own]:
                del vars(module)[name]
            vars(module).update(own)
            if not isinstance(module, torch.jit.ScriptModule):
                own_buffers(module).clear()
                own_buffers(module).update(buffers)
            for container, content in containers:
                container.clear()
                container.extend(content) if isinstance(container, (list, deque)) else container.update(content)
        for tensor, value, node in values:
            if node is None and tensor.grad_fn is not None and base_of(tensor) is None:
                tensor.detach_()
            tensor.data.copy_(value)

    return restore


def _optimizer_state(optimizer: torch.optim.Optimizer) -> Restore:
    """Copies settings and state of an optimizer, and returns what puts them back to the bit: its own `load_state_dict` rounds
    state to the parameters' type."""
    kept = [(p, name, value, copy.deepcopy(value)) for p, of in optimizer.state.items() for name, value in of.items()]
    groups = [{k: v if k == "params" else copy.deepcopy(v) for k, v in group.items()} for group in optimizer.param_groups]

    def restore() -> None:
        optimizer.state.clear()
        for p, name, value, content in kept:  # the same tensor is kept: others may hold it too
            optimizer.state[p][name] = value.copy_(content) if isinstance(value, Tensor) else content
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(settings)

    return restore


@contextmanager
def restored(
    model: nn.Module | None, batch: Any, optimizers: Sequence[torch.optim.Optimizer], failed: bool = False
) -> Iterator[None]:
    """Restores weights, gradients, buffers, optimizer state and random state when the block ends.

    Args:
        failed: the step before the block failed half-way, and so may the one in it.
    """
    reshard(model, failed)
    params = {**parameters_of(optimizers), **{id(p): p for p in (model.parameters() if model is not None else ())}}.values()
    weights = [(p, p.detach().clone(), p.grad, None if p.grad is None else p.grad.detach().clone()) for p in params]
    restorers = [*map(_optimizer_state, optimizers), snapshot(model, batch)]
    try:
        for p in params:
            p.grad = None
        yield
    finally:
        reshard(model, failed)
        with torch.no_grad():
            for p, value, grad, content in weights:
                p.data.copy_(value)
                p.grad = grad
                if grad is not None and content is not None:
                    grad.data.copy_(content)
            for restore in restorers:
                restore()


# --- FSDP2 and DDP ----------------------------------------------------------------------------------------------------


def reshard(model: nn.Module | None, failed: bool = False) -> None:
    """Has FSDP2 free what it has gathered (a root stays gathered after a forward without gradients), so that the model's
    parameters are those that an optimizer owns; after a step that failed half-way, no hook waits for its backward either."""
    module_type: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    modules: list[Any] = [] if model is None else [module for module in model.modules() if isinstance(module, module_type)]
    for module in modules:
        if failed:
            with suppress(RuntimeError, AttributeError):  # not of the root; not there before the first forward
                module.reset_iter_state()
        module.reshard()


def alone() -> AbstractContextManager[None]:
    """Leaves DDP out while a block runs: gradients and buffers are not exchanged, and an exchange that a failed backward had
    started is dropped."""

    def forward(module: Any, *inputs: Any, **kwargs: Any) -> Any:
        reset_reducer(module)
        return module.module(*inputs, **kwargs)

    return replaced(DistributedDataParallel, "forward", forward)
