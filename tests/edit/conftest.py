from __future__ import annotations

import pytest
from torch import nn

from tests.edit.toys import MODELS, build


@pytest.fixture(params=MODELS)
def name(request) -> str:
    return request.param


@pytest.fixture
def model(name) -> nn.Module:
    return build(name)
