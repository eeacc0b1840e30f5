"""State of one step for the guard: its start, and the holders of tensors (modules, the batch, variables of functions)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn

from omni.diagnostics.findings import Place
from omni.diagnostics.graph import Node, leaves_of, nodes_of
from omni.diagnostics.held import HeldTensor, held_by, held_in, reach, storage_of
from omni.diagnostics.recompute import Region
from omni.diagnostics.source import is_internal, name_writes, outer_writes, place_of
from omni.diagnostics.trace import Trace

FRAMES = 12
"""Number of the user's frames that are searched for variables."""


class Variable(NamedTuple):
    """A tensor in a variable of a running function, and the lines that write the variable."""

    name: str
    tensor: Tensor
    places: tuple[Place, ...]


@dataclass
class Scene:
    """One step.

    Attributes:
        names: path by id of each parameter and module.
        first: number of the step's first graph node.
        held: buffers, attributes and tensors of the batch at its beginning, with the graph and version each had then.
        frame: frame in which the step was started; `function`: the step as a function, where there is one.
    """

    model: nn.Module | None
    names: dict[int, str]
    first: int
    batch: Any = None
    frame: FrameType | None = None
    function: Callable[[], Any] | None = None
    held: list[tuple[HeldTensor, Node, int]] = field(default_factory=list)
    trace: Trace | None = None
    regions: list[Region] = field(default_factory=list)
    later: list[FrameType] = field(default_factory=list)

    def variables(self) -> Iterator[Variable]:
        """Tensors in variables of the user's functions: running ones, failed ones, and those that the step reaches."""
        seen: set[int] = set()
        for frame in [*self.later[::-1], *_callers(self.frame)]:
            for name, value in frame.f_locals.items():
                if name.startswith("__"):
                    continue
                for full, held, code in reach(name, value, frame.f_code, seen):
                    if code is frame.f_code:
                        free = name in frame.f_code.co_freevars
                        places = outer_writes(code, name) if free else name_writes(code, name, frame.f_lineno)
                    else:
                        places = held.written() if code is None else outer_writes(code, held.name)
                    yield Variable(full, held.tensor, places)
        if self.function is not None:
            for full, held, code in reach("the step", self.function, None, seen):
                yield Variable(full, held.tensor, held.written() if code is None else outer_writes(code, held.name))

    def remember(self, error: BaseException) -> None:
        """Store the user's frames in an error's traceback."""
        trace = error.__traceback__
        while trace is not None:
            if not is_internal(trace.tb_frame.f_code.co_filename):
                self.later.append(trace.tb_frame)
            trace = trace.tb_next

    def now(self) -> Iterator[HeldTensor]:
        """Tensors that modules and batch hold at this moment."""
        yield from held_by(self.model)
        yield from held_in(self.batch, "batch")

    def written(self, held: HeldTensor) -> Place | None:
        """The line that last wrote a held tensor: traced, or found in the source of its class."""
        if self.trace is not None:
            for other in self.now():
                if other.path == held.path and other.tensor.grad_fn is not None:
                    place = place_of(self.trace.last(storage_of(other.tensor)))
                    if place is not None:
                        return place
        places = held.written()
        return places[0] if places else None

    def origin(self, tensor: Tensor) -> Variable | None:
        """The variable of a running function at which the graph of a tensor from outside starts."""
        nodes = nodes_of([tensor])
        found = [v for v in self.variables() if v.tensor.grad_fn in nodes and v.places]
        return min(found, key=lambda v: v.tensor.grad_fn._sequence_nr(), default=None)  # type: ignore[union-attr]

    def trainable_of(self, tensor: Tensor) -> list[str]:
        """Names of the trainable parameters that a tensor's graph leads to."""
        return sorted(self.names.get(id(leaf), "a parameter outside the model") for leaf in leaves_of(nodes_of([tensor])))


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    count = 0
    while frame is not None and count < FRAMES:
        if not is_internal(frame.f_code.co_filename) and "-packages" not in frame.f_code.co_filename:
            count += 1
            yield frame
        frame = frame.f_back
