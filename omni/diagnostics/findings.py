"""Findings of the guard, with a place and a remedy, and the error that carries them."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

KINDS = {
    "inplace": "a tensor that backward needs was changed in place",
    "stale": "a tensor carries a graph from before this step",
    "freed": "a graph is walked a second time",
    "cache": "a cache was written while gradients record",
    "no_gradient": "trainable parameters receive no gradient",
    "not_owned": "parameters with a gradient that no optimizer owns",
    "inference": "an inference tensor takes part in training",
    "reentrant": "reentrant checkpointing without an input that requires a gradient",
    "recompute": "a checkpointed part runs differently the second time",
    "patch": "a patch takes no part in forward",
    "label_end": "labels mask the true end of a sequence",
    "no_target": "nothing to train on in this batch",
}
"""Kinds of findings with their meaning."""


_ADVICE = re.compile(r"\s*Specify retain_graph=True if [^.]*\.")
"""Torch's own advice for a graph that backward walks twice: it hides the mistake, or turns it into another error."""


class Place(NamedTuple):
    """A line of source; its code is read when it is asked for."""

    path: str
    line: int
    function: str

    @property
    def code(self) -> str:
        return linecache.getline(self.path, self.line).strip()

    @property
    def file(self) -> str:
        """The path, relative below the working folder."""
        full, here = os.path.realpath(self.path), os.path.realpath(".") + os.sep
        return full.removeprefix(here).replace(os.sep, "/") if full.startswith(here) else self.path

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}: {self.code}"


@dataclass(frozen=True)
class Finding:
    """One mistake, of a kind in `KINDS`.

    Attributes:
        tensor: name and shape of the tensor, or names of the parameters.
        module: path of the module that holds it, empty where none does.
        place: the line that is to be changed, where it is known; `others` take part.
        remedy: what to write instead.
    """

    kind: str
    what: str
    remedy: str
    tensor: str = ""
    module: str = ""
    place: Place | None = None
    others: tuple[Place, ...] = ()

    def __str__(self) -> str:
        lines = [f"[{self.kind}] {self.what}"]
        if self.tensor:
            lines.append(f"  tensor: {self.tensor}" + (f" (of module {self.module!r})" if self.module else ""))
        if self.place is not None:
            lines.append(f"  line:   {self.place}")
        lines += [f"  also:   {place}" for place in self.others[:3]]
        lines.append(f"  remedy: {self.remedy}")
        return "\n".join(lines)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for two findings of one mistake."""
        return self.kind, self.module, self.tensor, self.place


class GraphError(RuntimeError):
    """An error of autograd with its diagnosis; `findings` holds it, `__cause__` is the original.

    Args:
        message: the original error's; its advice to keep the graph is left out.
        hint: how to get more information, where little is known.
    """

    def __init__(self, message: str, findings: Sequence[Finding], hint: str = "") -> None:
        self.findings = list(findings)
        message = _ADVICE.sub("", message)
        super().__init__("\n\n".join(part for part in (message, report(findings), hint) if part))


def report(findings: Iterable[Finding]) -> str:
    """All findings as text, one under the other."""
    return "\n".join(str(finding) for finding in findings)


def some(names: Sequence[str], most: int = 6) -> str:
    """The first `most` names as text, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
