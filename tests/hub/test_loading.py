"""Loading a model from a folder: dtype, device, silence, and damage named on one line."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging as transformers_logging

from selfspec.errors import InvalidOption, ModelNotFound
from selfspec.hub import models as hub
from selfspec.hub import pretrained
from tests.models import make_model
from tests.talks import make_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer, saved as users have theirs."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    make_model("llama").save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize("dtype", ["float32", torch.bfloat16])
def test_model_loads_in_eval_mode_as_it_was_asked_for(folder: Path, dtype: Any) -> None:
    options: Any = {"dtype": dtype, "device": "cpu", "attn_implementation": "eager"}
    model, tokenizer, files = hub.load_model(folder, **options)
    assert str(model.dtype).removeprefix("torch.") == str(dtype).removeprefix("torch.")
    assert model.config._attn_implementation == "eager"
    assert not model.training
    assert tokenizer("b")["input_ids"] == make_tokenizer()("b")["input_ids"]
    assert (files.source, files.label, files.is_default) == (str(folder), "tiny", False)
    assert [Path(path).name for path, _, _ in files.stamps] == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(("device", "device_map"), [("auto", "auto"), ("cpu", None)])
def test_layers_are_spread_over_devices_on_request(
    folder: Path, device: str, device_map: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, asked = pretrained.load, []

    def spy(source: str, **options: Any) -> tuple[Any, Any]:
        asked.append(options["device_map"])
        return original(source, **options)

    monkeypatch.setattr(pretrained, "load", spy)
    hub.load_model(folder, device=device)
    assert asked == [device_map]


@pytest.mark.parametrize("shown", [True, False])
def test_loading_shows_no_bars_and_leaves_the_setting_alone(
    folder: Path, shown: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    bars: Any = transformers_logging
    before = bars.is_progress_bar_enabled()
    (bars.enable_progress_bar if shown else bars.disable_progress_bar)()
    try:
        hub.load_model(folder, device="cpu")
        assert bars.is_progress_bar_enabled() is shown
    finally:
        (bars.enable_progress_bar if before else bars.disable_progress_bar)()
    assert "Loading weights" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype is 'int8', expected float32"),
        ({"dtype": "cuda"}, "dtype is 'cuda', expected float32"),
        ({"device": "toaster"}, "device is 'toaster', expected cpu"),
        ({"device": "cuda:99"}, "cannot use device cuda:99"),
    ],
)
def test_bad_dtype_or_device_is_an_invalid_option(
    folder: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidOption, match=message):
        hub.load_model(folder, **options)


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("model.safetensors", r"has no weights \(\*.safetensors\)\. Copy all files"),
        ("token*", r"has no tokenizer \(tokenizer\*, vocab\*, \*.model\)\. Copy"),
    ],
)
def test_what_a_model_folder_lacks_is_named_on_one_line(
    folder: Path, tmp_path: Path, gone: str, message: str
) -> None:
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    for file in broken.glob(gone):
        file.unlink()
    with pytest.raises(ModelNotFound, match=f"broken {message}") as caught:
        hub.load_model(broken)
    assert "\n" not in str(caught.value)
    torch.save({}, broken / "pytorch_model.bin")
    with pytest.raises(ModelNotFound, match="pickles: convert" if "model" in gone else message):
        hub.load_model(broken)
