"""The guard, which watches steps of any PyTorch training for mistakes with graphs, gradients and caches."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from omni.diagnostics.diagnose import diagnose, kind_of, traced_changes
from omni.diagnostics.findings import Finding, GraphError, report
from omni.diagnostics.gradients import at_start, is_zeroed, loose, missing_gradients, owned_by, unowned, written_caches
from omni.diagnostics.graph import next_number
from omni.diagnostics.held import held_by, held_in, version_of
from omni.diagnostics.labels import untrained_ends
from omni.diagnostics.patches import Expectation, foreign_forwards
from omni.diagnostics.recompute import watch_checkpoints
from omni.diagnostics.scene import Scene
from omni.diagnostics.sharded import alone, end_step, gathered
from omni.diagnostics.snapshot import Snapshot, restored
from omni.diagnostics.state import Doubt
from omni.diagnostics.trace import Trace

PATIENCE = 32
"""Number of steps that a parameter which has received gradients may go without one."""

HINT = "For the line of each culprit, repeat the step: guard.rerun(step), where step() does what failed."


class Guard:
    """Watches steps and collects findings.

        guard = Guard(model, optimizer)
        for batch in batches:
            with guard.step(batch):
                loss = model(batch)
                loss.backward()
                optimizer.step()
        print(guard.report())

    The checks of every step are cheap. The full trace, which knows the line of each write, records every operation: it
    repeats one step (`rerun`, or `run`, which does so when the step fails). Nothing is kept between steps. In steps 1, 2,
    4, 8 and so on, state of checkpointed parts is compared when backward repeats them; where it differs, which may be harmless,
    the next step runs under the trace, once for each piece of state.

    Args:
        model: the model whose state and parameters are checked; several in one `nn.ModuleList`.
        optimizer: one or several; their steps mark complete gradients, and their parameters count as owned. A wrapper's inner
            one (its attribute `optimizer`) is taken.
        idle: parameters that need no gradient although they are trainable.
        end_id: the token that ends a sequence, where it is to be trained. Batches are then checked for labels that mask every
            end, until one is seen in which an end is trained: integer tensors [B, T] side by side, in a mapping or an object,
            called input_ids, tokens, inputs or ids, and labels, label, targets or target (-100 is left out of the loss).

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
        self.optimizers = [_inner(o) for o in given]
        self.key, self.told = -next(_NUMBERS), self._on_optimizer_step
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
        return _Step(self, batch, last, trace, sys._getframe(1))

    def rerun(self, step: Callable[[], Any], batch: Any = None) -> list[Finding]:
        """Repeat the last step under a full trace; returns its findings, which are also added to `findings`.

        It starts from the random state, buffers and attributes that the last step started from. Weights, gradients and
        optimizer are the present ones (a step that failed in backward has not changed them), and afterwards all is restored.
        A failed step is repeated without DDP's exchange of gradients; under FSDP2 all processes must repeat it together.

        Args:
            step: does what the last step did; it may enter `guard.step` itself.
        """
        batch = self.batch if batch is None else batch
        start, failed, recent = self.start, self.failed, {f.key for f in self.recent}
        before, self.findings = self.findings, [f for f in self.findings if f.key not in recent]
        watched = _Step(self, batch, True, True, sys._getframe(1), step, failed=failed)
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
        failed = watched.failed
        if failed:
            end_step(self.model)
        with restored(self.model, watched.batch, self.optimizers), alone() if failed else nullcontext():
            if start is not None:
                start.restore()
            try:
                with watched:
                    step()
            except GraphError:
                pass
            finally:
                if failed:
                    end_step(self.model)

    def run(self, step: Callable[[], Any], batch: Any = None, *, trace: bool = False) -> Any:
        """Run one step; where autograd fails, repeat it under a full trace and raise the complete diagnosis.

        Args:
            trace: trace the step even if nothing fails: some mistakes give wrong gradients and no error.
        """
        try:
            with _Step(self, batch, True, False, sys._getframe(1), step, keep=trace):
                out = step()
        except GraphError as error:
            cause, found, hint = error.__cause__, error.findings, ""
            try:
                found = self.rerun(step, batch) or found
            except Exception as other:  # the cause is what counts
                hint = f"Repeated under a trace, the step failed in another way ({type(other).__name__}): {_first_line(other)}"
            raise GraphError(str(cause), found, hint) from cause
        if trace:
            self.rerun(step, batch)
        return out

    def expect_changed(self, module: nn.Module, tensors: Any = None) -> Expectation:
        """Context manager around one forward that checks that a patch of this module takes part in it.

        Args:
            tensors: tensors that the patch put in; the module's own parameters by default. Where the module has hooks or a
                replaced `forward`, it is also expected to be called.
        """
        return Expectation(self, module, tensors)

    def report(self) -> str:
        return report(self.findings)

    def add(self, findings: Iterable[Finding]) -> list[Finding]:
        """Add the findings that are new; returns the given ones, each once."""
        given = list({finding.key: finding for finding in findings}.values())
        placed = {finding.key[:3] for finding in given if finding.place is not None}
        self.findings = [f for f in self.findings if f.place is not None or f.key[:3] not in placed]
        known = {finding.key for finding in self.findings}
        self.findings += [finding for finding in given if finding.key not in known]
        return given

    def names(self) -> dict[int, str]:
        """Paths of parameters (gathered and sharded) and modules by id."""
        if self.model is None:
            return {}
        names = {id(module): path for path, module in self.model.named_modules()}
        names.update((id(p), path) for path, p in self.model.named_parameters())
        for whole, p in gathered(self.model).items():
            path = names.get(whole) or names.get(id(p))
            if path is not None:
                names[whole] = names[id(p)] = path
        return names

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Trainable parameters by path, as an optimizer owns them; those that only the optimizer has are numbered."""
        named = [] if self.model is None else list(self.model.named_parameters())
        owners = gathered(self.model)
        named = [(name, owners.get(id(p), p)) for name, p in named]
        if self.model is None:
            owned = [p for o in self.optimizers for group in o.param_groups for p in group["params"]]
            named = [(f"parameter {i} of the optimizer", p) for i, p in enumerate(owned)]
        return [(name, p) for name, p in named if p.requires_grad and not is_lazy(p) and p.numel()]

    def _on_optimizer_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Hook of the optimizers; the same object in every step, so that an optimizer with a compiled step compiles once."""
        if self.active is not None:
            self.active.note_step(optimizer)


class _Step:
    """One step of a guard, as a context manager."""

    def __init__(
        self,
        guard: Guard,
        batch: Any,
        last: bool,
        trace: bool,
        frame: FrameType,
        function: Callable[[], Any] | None = None,
        keep: bool = False,
        failed: bool = False,
    ) -> None:
        self.guard, self.batch, self.last, self.traced = guard, batch, last, trace
        self.frame: FrameType | None = frame
        self.function, self.keep, self.failed = function, keep, failed
        self.stack = ExitStack()
        self.found: list[Finding] = []
        self.beside: list[Finding] = []  # findings that hold only if the step does not fail
        self.stepped: list[torch.optim.Optimizer] = []
        self.inner = False

    def __enter__(self) -> _Step:
        guard = self.guard
        if guard.active is not None:  # a step that is repeated may have its own `guard.step`
            self.inner = True
            return self
        guard.active, guard.batch, guard.failed = self, self.batch, False
        guard.steps += 1
        self.traced = self.traced or not guard.doubts <= guard.settled
        guard.settled |= guard.doubts
        doubt = guard.doubts.update if guard.steps & (guard.steps - 1) == 0 else None
        guard.start = self.start = Snapshot(guard.model, self.batch)
        names = guard.names()
        self.scene = scene = Scene(guard.model, names, next_number(), self.batch, self.frame, self.function)
        held = [*held_by(guard.model), *held_in(self.batch, "batch")]
        scene.held = [(h, h.tensor.grad_fn, version_of(h.tensor)) for h in held]
        scene.held += [(h, None, -1) for h in held_by(guard.model, parameters=True) if h.tensor.is_inference()]
        self.named = guard.parameters()
        owners = gathered(guard.model)
        self.idle = {id(owners.get(i, p)) for i, p in guard.idle.items()}
        self._check_labels()
        self.beside += foreign_forwards(guard.model, names)
        for _, p in self.named:
            self.stack.callback(p.register_post_accumulate_grad_hook(self._arrived).remove)
        for optimizer in guard.optimizers:
            hooks: dict[int, Any] = optimizer._optimizer_step_pre_hooks
            hooks[guard.key] = guard.told
            self.stack.callback(hooks.pop, guard.key, None)
        self.loose = loose([pair for pair in self.named if id(pair[1]) not in self.idle], guard.optimizers)
        if self.traced:
            scene.trace = Trace(self._trainable_paths(), scene.first)
        watching = watch_checkpoints(self.found.append, scene.trace, guard.model, names, doubt)
        scene.regions = self.stack.enter_context(watching)
        if scene.trace is not None:
            self.stack.enter_context(scene.trace.running())
        return self

    def _trainable_paths(self) -> dict[int, str]:
        """Paths of the trainable parameters, by id of every tensor that represents them."""
        wanted = {name for name, _ in self.named}
        return {i: name for i, name in self.scene.names.items() if name in wanted} | {id(p): name for name, p in self.named}

    def _check_labels(self) -> None:
        guard = self.guard
        if guard.end_id is not None:
            self.beside, taught = untrained_ends(self.batch, guard.end_id)
            if taught:
                guard.end_id = None

    def _arrived(self, p: Tensor) -> None:
        if p.grad is not None:  # a backward may give no gradient
            self.guard.arrived.add(id(p))

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.stepped.append(optimizer)
        self._note_gradients()

    def _note_gradients(self) -> None:
        """Note gradients that came by other means than backward, or before this step started."""
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
        """Find missing gradients when the step is over; several backwards and optimizers in it count as one step."""
        guard = self.guard
        self._note_gradients()
        explained = {name for f in self.found if f.kind == "reentrant" for name in f.tensor.split(", ")}
        spared = self.idle | (owned_by(guard.optimizers) - owned_by(self.stepped) if self.stepped else set())
        wanted = [(name, p) for name, p in self.named if id(p) not in spared and not self._is_intermittent(p)]
        if self.stepped or guard.arrived:
            self.beside += missing_gradients(self.scene, wanted, guard.arrived, explained)
            self.beside += unowned(self.loose, guard.arrived, bool(self.stepped))
        guard.arrived.clear()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.inner:
            return
        guard, scene = self.guard, self.scene
        guard.active = None
        self.stack.close()
        try:
            start = at_start(scene)
            if error is None:
                if self.last or self.stepped:
                    self._check_gradients()
                if scene.trace is None:
                    self.found += written_caches(scene)
                self.found += traced_changes(scene)
                self.found += [finding for region in scene.regions for finding in region.findings()]
                self.found += [] if self.failed else self.beside
                self.found = guard.recent = guard.add([*start, *self.found])
                if not self.found and not self.keep:
                    self.start.forget()
                return
            guard.arrived.clear()
            if not isinstance(error, RuntimeError) or isinstance(error, GraphError) or kind_of(error) is None:
                return
            guard.failed = True
            scene.remember(error)
            self.found = guard.recent = guard.add([*start, *self.found, *diagnose(scene, error)])
            raise GraphError(str(error), self.found, "" if self.traced else HINT) from error
        finally:
            scene.later.clear()
            scene.held.clear()
            if scene.trace is not None:
                scene.trace.forget()
            scene.frame = self.frame = None


_NUMBERS = itertools.count(1)


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """An optimizer, or the one that a wrapper holds."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if hasattr(inner, "_optimizer_step_pre_hooks"):
        return inner
    found = [value for value in getattr(inner, "__dict__", {}).values() if isinstance(value, torch.optim.Optimizer)]
    if len(found) != 1:
        raise TypeError(f"{type(optimizer).__name__} is no torch.optim.Optimizer, nor holds one; give the guard the one inside")
    return found[0]


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
