"""The guard, which watches steps of any PyTorch training for mistakes with graphs, gradients and caches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from omni.diagnostics.diagnose import (
    Scene,
    at_start,
    diagnose,
    fingerprint,
    is_zeroed,
    kind_of,
    missing_gradients,
    owned_by,
    traced_changes,
    unowned,
)
from omni.diagnostics.findings import Finding, GraphError, report
from omni.diagnostics.held import held_by, version_of
from omni.diagnostics.labels import untrained_ends
from omni.diagnostics.patches import expectation, foreign_forwards
from omni.diagnostics.recompute import CheckpointWatch, Doubt
from omni.diagnostics.snapshot import Snapshot, alone, reshard, restored
from omni.diagnostics.trace import Trace, next_number

PATIENCE = 32
"""Number of steps that a parameter which has received gradients may go without one."""

HINT = "For the line of each culprit, repeat the step: guard.rerun(step), where step() does what failed."


class Guard:
    """Watches steps and collects findings (docs/gradients.md); nothing is kept between steps.

    In steps 1, 2, 4, 8 and so on, state of checkpointed parts is compared when backward repeats them; where it differs, which
    may be harmless, the next step is traced.

    Args:
        model: the model whose state and parameters are checked; several in one `nn.ModuleList`.
        optimizer: one or several (of a wrapper its attribute `optimizer`); their steps mark complete gradients, and their
            parameters count as owned.
        idle: parameters that need no gradient although they are trainable.
        end_id: the token that ends a sequence: batches are checked for labels that mask every end, until one trains an end.

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
        end_id: int | None = None,
    ) -> None:
        given = [] if optimizer is None else list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        self.model = model
        self.optimizers: list[torch.optim.Optimizer] = [getattr(one, "optimizer", one) for one in given]
        self.idle = {id(p): p for p in idle}
        self.end_id = end_id
        self.findings: list[Finding] = []
        self.failed = False
        self.arrived: set[int] = set()
        self.waiting: dict[int, int] = {}
        self.start: Snapshot | None = None
        self.batch: Any = None
        self.active: _Step | None = None
        self.recent: list[Finding] = []
        self.steps = 0
        self.doubts: set[Doubt] = set()
        self.settled: set[Doubt] = set()

    def step(self, batch: Any = None, *, last: bool = True, trace: bool = False) -> _Step:
        """Context manager around forward and backward, optionally also around the optimizer's step.

        Args:
            batch: inputs of the step (tensors, and containers and objects that hold some), which are checked too.
            last: False for a micro-batch that others follow before gradients are complete.
            trace: record every operation.

        Raises:
            GraphError: autograd failed inside; with the original message and the diagnosis.
        """
        return _Step(self, batch, sys._getframe(1), last=last, traced=trace)

    def rerun(self, step: Callable[[], Any], batch: Any = None) -> list[Finding]:
        """Repeats the last step under a full trace; returns its findings, which are also added to `findings`.

        It starts from the random state, buffers and attributes that the last step started from, with the present weights and
        optimizer; afterwards all is restored. A failed step is repeated without DDP's exchange of gradients; under FSDP2 all
        processes must repeat it together.

        Args:
            step: does what the last step did; it may enter `guard.step` itself.
        """
        batch = self.batch if batch is None else batch
        start, failed, recent = self.start, self.failed, {f.key for f in self.recent}
        before, self.findings = self.findings, [f for f in self.findings if f.key not in recent]
        watched = _Step(self, batch, sys._getframe(1), step, traced=True, failed=failed)
        try:
            self._repeat(watched, step, start)
        except BaseException:
            self.add(before)
            raise
        finally:
            self.start, self.failed = start, failed
        kinds = {finding.kind for finding in watched.found}
        # Findings of the trace replace the vaguer ones from before; a step sees only some of the patches.
        self.add(f for f in before if f.kind not in kinds or f.kind == "patch")
        return watched.found

    def _repeat(self, watched: _Step, step: Callable[[], Any], start: Snapshot | None) -> None:
        if watched.failed:
            reshard(self.model, failed=True)
        with restored(self.model, watched.batch, self.optimizers), alone() if watched.failed else nullcontext():
            if start is not None:
                start.restore()
            try:
                with watched:
                    step()
            except GraphError:
                pass
            finally:
                if watched.failed:
                    reshard(self.model, failed=True)

    def run(self, step: Callable[[], Any], batch: Any = None, *, trace: bool = False) -> Any:
        """Runs one step; where autograd fails, repeats it under a full trace and raises the complete diagnosis.

        Args:
            trace: trace the step even if nothing fails: some mistakes give wrong gradients and no error.
        """
        try:
            with _Step(self, batch, sys._getframe(1), step, keep=trace):
                out = step()
        except GraphError as error:
            cause, found, hint = error.__cause__, error.findings, ""
            try:
                found = self.rerun(step, batch) or found
            except Exception as other:  # the cause is what counts
                hint = f"Repeated under a trace, the step failed in another way ({type(other).__name__}): {other}"
            raise GraphError(str(cause), found, hint) from cause
        if trace:
            self.rerun(step, batch)
        return out

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
        given = list({finding.key: finding for finding in findings}.values())
        placed = {finding.key[:3] for finding in given if finding.place is not None}
        self.findings = [f for f in self.findings if f.place is not None or f.key[:3] not in placed]
        known = {finding.key for finding in self.findings}
        self.findings += [finding for finding in given if finding.key not in known]
        return given

    def names(self) -> dict[int, str]:
        """Paths of parameters and modules by id."""
        if self.model is None:
            return {}
        return {id(one): path for path, one in [*self.model.named_modules(), *self.model.named_parameters()]}

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Trainable parameters by path; those that only the optimizer has are numbered."""
        if self.model is not None:
            named = list(self.model.named_parameters())
        else:
            owned = [p for o in self.optimizers for group in o.param_groups for p in group["params"]]
            named = [(f"parameter {i} of the optimizer", p) for i, p in enumerate(owned)]
        return [(name, p) for name, p in named if p.requires_grad and not is_lazy(p) and p.numel()]


@dataclass(eq=False)
class _Step:
    """One step of a guard, as a context manager.

    Attributes:
        keep: keep its start for a repetition that is asked for.
        failed: it repeats a step that failed.
        beside: findings that hold only if the step does not fail.
        inner: it is within another step of its guard, as where a step that is repeated has its own `guard.step`.
    """

    guard: Guard
    batch: Any
    frame: FrameType | None
    function: Callable[[], Any] | None = None
    last: bool = True
    traced: bool = False
    keep: bool = False
    failed: bool = False
    found: list[Finding] = field(default_factory=list)
    beside: list[Finding] = field(default_factory=list)
    stepped: list[torch.optim.Optimizer] = field(default_factory=list)
    stack: ExitStack = field(default_factory=ExitStack)
    inner: bool = False

    def __enter__(self) -> _Step:
        guard = self.guard
        self.inner = guard.active is not None
        if self.inner:
            return self
        guard.active, guard.batch, guard.failed = self, self.batch, False
        guard.steps += 1
        self.traced = self.traced or not guard.doubts <= guard.settled
        guard.settled |= guard.doubts
        reshard(guard.model)
        guard.start = self.start = Snapshot(guard.model, self.batch)
        names, self.named = guard.names(), guard.parameters()
        self.scene = scene = Scene(guard.model, names, next_number(), self.batch, self.frame, self.function)
        scene.held = [(h, h.tensor.grad_fn, version_of(h.tensor)) for h in scene.now()]
        scene.held += [(h, None, -1) for h in held_by(guard.model, parameters=True) if h.tensor.is_inference()]
        if guard.end_id is not None:
            self.beside, taught = untrained_ends(self.batch, guard.end_id)
            guard.end_id = None if taught else guard.end_id
        self.beside += foreign_forwards(guard.model, names)
        owned = owned_by(guard.optimizers) | guard.idle.keys()
        loose = [(name, p) for name, p in self.named if guard.optimizers and id(p) not in owned]
        self.unowned = [(name, p, fingerprint(p)) for name, p in loose]
        if self.traced:
            scene.trace = Trace({id(p): name for name, p in self.named}, scene.first)
        self._watch(names)
        return self

    def _watch(self, names: dict[int, str]) -> None:
        """Sets the hooks of the step, and starts the trace."""
        guard, scene = self.guard, self.scene
        for _, p in self.named:
            self.stack.callback(p.register_post_accumulate_grad_hook(self._arrived).remove)
        for optimizer in guard.optimizers:
            self.stack.callback(optimizer.register_step_pre_hook(self._note_step).remove)
        doubt = guard.doubts.update if guard.steps & (guard.steps - 1) == 0 else None
        watch = CheckpointWatch(self.found.append, scene.trace, guard.model, names, doubt)
        self.stack.enter_context(watch.running())
        scene.regions = watch.regions
        if scene.trace is not None:
            self.stack.enter_context(scene.trace.running())

    def _arrived(self, p: Tensor) -> None:
        if p.grad is not None:  # a backward may give no gradient
            self.guard.arrived.add(id(p))

    def _note_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.stepped.append(optimizer)
        self._note_gradients()

    def _note_gradients(self) -> None:
        """Notes gradients that came by other means than backward, or before this step started."""
        arrived = self.guard.arrived
        arrived |= {id(p) for _, p in self.named if p.grad is not None and id(p) not in arrived and not is_zeroed(p, arrived)}

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
        explained = {name for f in self.found if f.kind == "reentrant" for name in f.tensor.split(", ")}
        spared = guard.idle.keys() | (owned_by(guard.optimizers) - owned_by(self.stepped) if self.stepped else set())
        wanted = [(name, p) for name, p in self.named if id(p) not in spared and not self._is_intermittent(p)]
        if self.stepped or guard.arrived:
            self.beside += missing_gradients(self.scene, wanted, guard.arrived, explained)
            self.beside += unowned(self.unowned, guard.arrived, bool(self.stepped))
        guard.arrived.clear()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.inner:
            return
        guard, scene = self.guard, self.scene
        guard.active = None
        self.stack.close()
        try:
            if error is None:
                self._end()
                return
            guard.arrived.clear()
            if not isinstance(error, RuntimeError) or isinstance(error, GraphError) or kind_of(error) is None:
                return
            guard.failed = True
            scene.remember(error)
            self.found = guard.recent = guard.add([*at_start(scene), *self.found, *diagnose(scene, error)])
            raise GraphError(str(error), self.found, "" if self.traced else HINT) from error
        finally:
            scene.later.clear()
            scene.held.clear()
            if scene.trace is not None:
                scene.trace.forget()
            scene.frame = self.frame = None

    def _end(self) -> None:
        """Looks at a step that did not fail."""
        guard, scene = self.guard, self.scene
        start = at_start(scene)
        if self.last or self.stepped:
            self._check_gradients()
        self.found += traced_changes(scene)
        self.found += [finding for region in scene.regions for finding in region.findings()]
        self.found += [] if self.failed else self.beside
        self.found = guard.recent = guard.add([*start, *self.found])
        if not self.found and not self.keep:
            self.start.forget()
