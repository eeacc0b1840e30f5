from __future__ import annotations

import pytest
from torch import nn

from tests.edit.toys import MODELS, build
from tests.generate.conftest import layout, lm

__all__ = ["layout", "lm"]


@pytest.fixture(params=MODELS)
def name(request) -> str:
    return request.param


@pytest.fixture
def model(name) -> nn.Module:
    return build(name)
