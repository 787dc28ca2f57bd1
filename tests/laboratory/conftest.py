"""A tiny model in a folder, and prompts: what scripts are tried on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.talks import save_tiny


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its folder; no test writes there."""
    return str(save_tiny(tmp_path_factory.mktemp("laboratory") / "model"))


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    """Eight of them, in a file."""
    words = [" ".join(f"{number:03b}".replace("0", "a").replace("1", "b")) for number in range(8)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in words))
    return str(path)
