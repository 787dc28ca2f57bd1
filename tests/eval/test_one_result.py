"""One row, one result: however a text is cut into passes, on the fused executor."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eval.one_row import main as command
from selfspec.api.speculator import wrap
from selfspec.decoding.probe import PassShape, any_split
from selfspec.eval.one_result import WAYS, Way, logits
from selfspec.model.backbone import Backbone
from selfspec.model.executors.fused_cpu import FusedExecutor
from tests.models import make_model, random_ids
from tests.talks import make_tokenizer

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a compiler")

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "num_hidden_layers": 4},
    "mistral": {},  # a sliding window
    "qwen2": {},  # biases of queries, keys and values
    "qwen3": {},  # norms of queries and keys
    "gemma3": {},  # norms behind sublayers, two rotations
    "gpt_neox": {},  # attention and MLP side by side
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", MODELS)
def test_a_row_has_one_result(family: str, dtype: torch.dtype) -> None:
    backbone = Backbone(make_model(family, dtype, **MODELS[family]), executor="fused")
    ids = random_ids(200)[0]  # across blocks of 64 positions and the sliding window
    expected = logits(backbone, ids)
    for name, way in WAYS.items():
        assert torch.equal(logits(backbone, ids, way), expected), name


def test_a_kept_half_and_drafts_that_are_taken_back_are_really_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ways differ in what they do: passes and rows, counted."""
    backbone, ids, rows = Backbone(make_model("llama"), executor="fused"), random_ids(20)[0], []
    logits(backbone, ids, Way([20], branch=True))  # the first tree is checked
    run = backbone._executor.run

    def counted(hidden: Tensor, *given: Any) -> Tensor:
        rows.append(len(hidden))
        return run(hidden, *given)

    monkeypatch.setattr(backbone._executor, "run", counted)
    for way, expected in (
        (None, [20]),
        (Way([7]), [7, 7, 6]),
        (Way([1, 4], wrong=3), [4, 7] * 4),
        (Way([500], wrong=2, kept=True), [12, 12]),
        (Way([4, 1], branch=True), [8, 2] * 4),
    ):
        rows.clear()
        logits(backbone, ids, way)
        assert rows == expected


def test_a_product_that_looks_at_the_number_of_rows_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exact = FusedExecutor.logits
    backbone, ids = Backbone(make_model("llama"), executor="fused"), random_ids(80)[0]
    monkeypatch.setattr(
        FusedExecutor,
        "logits",
        lambda self, rows: exact(self, rows) * (1 + 2**-22 * (len(rows) > 64)),
    )
    expected = logits(backbone, ids)
    differing = [
        name for name, way in WAYS.items() if not torch.equal(logits(backbone, ids, way), expected)
    ]
    assert "pieces of 64" in differing
    assert "pieces of 500" not in differing


def test_only_an_executor_that_claims_it_is_held_to_it() -> None:
    model = make_model("llama")
    claims = {
        name: any_split(Backbone(model, executor=name), PassShape())
        for name in ("fused", "generic")
    }
    assert claims == {"fused": True, "generic": False}
    assert not any_split(Backbone(model, executor="fused"), PassShape(rows=6, slots=64))


def test_a_session_gives_the_text_of_a_fresh_start_bit_for_bit() -> None:
    """Turns that go on behind what the last one left."""
    speculator = wrap(make_model("llama", torch.bfloat16), executor="fused")
    session, ids = speculator.session(), random_ids(30)
    first = session.generate(ids, max_new_tokens=20)
    again = torch.cat([ids, torch.tensor([first.token_ids]), random_ids(9, seed=3)], 1)
    second = session.generate(again, max_new_tokens=20)
    assert second.token_ids == speculator.generate(again, max_new_tokens=20).token_ids


def test_the_command_compares_real_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("llama").save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a b a a b"}\n{"prompt": "b b a"}\n')
    monkeypatch.chdir(tmp_path)
    asked: dict[str, Any] = {"model": "model", "suite": "prompts.jsonl", "new_tokens": 5}
    command(tmp_path / "out", dtype="float32", **asked)
    page = (tmp_path / "out" / "table.md").read_text()
    assert page.count("| 0 |\n") == len(WAYS)
    with pytest.raises(SystemExit, match="generic executor does not claim it"):
        command(tmp_path / "other", dtype="float32", executor="generic", **asked)
    monkeypatch.setattr(
        FusedExecutor,
        "logits",
        lambda self, rows, exact=FusedExecutor.logits: (
            exact(self, rows) * (1 + 2**-22 * (len(rows) > 3))
        ),
    )
    with pytest.raises(SystemExit, match="1"):
        command(tmp_path / "third", dtype="float32", **asked)
