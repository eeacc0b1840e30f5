"""Diagnosis of mistakes with autograd: graphs kept too long, tensors changed in place, gradients that never arrive."""

from omni.diagnostics.findings import KINDS, Finding, GraphError, Place, report
from omni.diagnostics.guard import Guard
from omni.diagnostics.labels import check_labels, check_targets

__all__ = ["KINDS", "Finding", "GraphError", "Guard", "Place", "check_labels", "check_targets", "report"]
