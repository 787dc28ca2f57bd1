"""Prompts by length: both sides are timed, and their memory is measured alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from eval.prompt_speed import main
from tests.models import make_model
from tests.talks import make_tokenizer


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_both_sides_are_measured(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    main(tmp_path / "out", model=str(tmp_path / "model"), lengths="40", repeats=1)
    found = json.loads((tmp_path / "out" / "summary.json").read_text())["prompts"]
    (entry,) = found
    assert entry["tokens"] == 40
    assert min(entry["seconds"].values()) > 0
    assert entry["seconds"].keys() == entry["peak_mb"].keys() == {"selfspec", "hugging-face"}
    page = (tmp_path / "out" / "table.md").read_text()
    assert page.count(" MB |") == 2
