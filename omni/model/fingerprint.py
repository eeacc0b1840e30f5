"""Tells quickly whether a module's parts have changed; a whole comparison takes as long as a small model's block."""

from __future__ import annotations

from torch import nn

from omni.utils.private import children, forward_hooks, own_parameters


class Fingerprint:
    """The modules and parameters beneath a module, itself among them.

    Attributes:
        weights: the parameters that it had.
    """

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        self.weights = [p for part in modules for p in own_parameters(part).values() if p is not None]
        self._children = [(children(part), [*children(part).values()]) for part in modules]
        self._own = [(own_parameters(part), [*map(id, own_parameters(part).values())]) for part in modules]
        self._addresses = [weight.data_ptr() for weight in self.weights]
        self._hooks = [hooks for part in modules for hooks in forward_hooks(part)]

    def same(self) -> bool:
        """Whether all of them are there still, and no others, with their numbers where they were."""
        return (
            all([*now.values()] == before for now, before in self._children)
            and all([*map(id, now.values())] == before for now, before in self._own)
            and [weight.data_ptr() for weight in self.weights] == self._addresses
        )

    def has_forward_hooks(self) -> bool:
        """Whether something is to act beside one of them: a hook."""
        return any(self._hooks)
