"""Diagnosis of mistakes with autograd: graphs kept too long, tensors changed in place, gradients that never arrive."""

from omni.diagnostics.checks import check_labels, check_targets
from omni.diagnostics.findings import Finding, GraphError, Line, report
from omni.diagnostics.guard import Guard

__all__ = ["Finding", "GraphError", "Guard", "Line", "check_labels", "check_targets", "report"]
