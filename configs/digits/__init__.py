"""The toy data: spoken questions about digits, made while training; and the exam of a model that was trained on them.

A plug-in beside its recipes, which name it by `plugins: [./digits]`; an example of a source of one's own (docs/extending.md).
"""

from . import options as options
