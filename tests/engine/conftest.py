"""Fixtures of the tests of generating."""

from tests.generate.conftest import begun, chatty, layout
from tests.generate.test_adapters import folders

__all__ = ["begun", "chatty", "folders", "layout"]
