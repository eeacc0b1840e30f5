"""Findings of the guard, with a place and a remedy, and the error that carries them."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class Place:
    """A line of source: path (relative below the working folder), line number from 1, the code itself and its function."""

    file: str
    line: int
    code: str
    function: str

    @classmethod
    def at(cls, file: str, line: int, function: str) -> Place:
        code = linecache.getline(file, line).strip()
        try:
            inside = Path(file).resolve().relative_to(Path.cwd())
        except (ValueError, OSError):
            return cls(file, line, code, function)
        return cls(str(inside).replace(os.sep, "/"), line, code, function)

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}: {self.code}" if self.code else f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Finding:
    """One mistake.

    Attributes:
        kind: a key of `KINDS`.
        what: the mistake, in a sentence.
        tensor: name and shape of the tensor, or names of the parameters.
        module: path of the module that holds it, empty where none does.
        place: the line that is to be changed, where it is known.
        remedy: advice on what to write instead.
        others: further lines that take part.
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
        """Key by which two findings are the same mistake."""
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
