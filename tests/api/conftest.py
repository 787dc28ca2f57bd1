"""The speculator that the API tests share."""

from __future__ import annotations

from typing import Any

import pytest

from selfspec.api.speculator import Speculator, wrap


@pytest.fixture(scope="module")
def speculator(exact: Any) -> Speculator:
    """A speculator that drafts all the time, mostly wrongly."""
    return wrap(exact, heads="logit-lens", drafter="exit:layers=2/5,threshold=0.05,max_tokens=4")
