"""Fixtures that all tests share: tiny random models, built once per session, never downloaded."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # set before transformers is imported: no test uses the network
os.environ["OMP_NUM_THREADS"] = "1"  # set before torch is imported; holds for child processes, too
os.environ.setdefault("CXX", "c++ -Wall -Wextra -Werror")  # compilers' warnings fail tests

import pytest
import torch
from hypothesis import settings
from transformers import PreTrainedModel

from selfspec.api import tuned
from selfspec.api.speculator import Speculator, load
from selfspec.decoding import measure
from selfspec.files import cache_folder
from selfspec.model.backbone import Backbone
from selfspec.model.weights import TEAM
from tests.models import CHEAP, make_model, wrapped

gc.set_threshold(50_000)  # as the program sets it: scans of what imports made took a tenth
settings.register_profile("suite", max_examples=8, derandomize=True, deadline=None, database=None)
settings.register_profile("fuzz", max_examples=150, deadline=None, print_blob=True)
settings.register_profile("hostile", max_examples=3000, deadline=None, print_blob=True)
settings.register_profile("same-texts", max_examples=4000, deadline=None, print_blob=True)
settings.load_profile("suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with slow tests first, so that no worker is left alone with one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a cache folder of the tests' own and no options of the user, which could change results.

    Compiled loops are shared with the user's cache, converted models among this run's workers.
    """
    folder, base = tmp_path_factory.mktemp("cache"), tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    _share(folder, compiled=cache_folder() / "compiled", models=base / "models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        # nothing must depend on how busy this machine is
        patch.setattr(TEAM, "measured", nullcontext)
        patch.setattr(tuned, "first_costs", lambda *_: {})
        patch.setattr(measure, "_QUICK_S", 0.0)  # no longer than the fewest passes take
        patch.setattr(measure, "_CPU_BYTES", 4000)
        yield


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder for one test, empty except for the compiled loops."""
    _share(tmp_path / "cache", compiled=cache_folder() / "compiled")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "selfspec"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Use one thread: in tiny linear layers a second one only waits. Tests may set more."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_known_heads() -> None:
    """Forget heads that another test fitted to the same tiny model."""
    shutil.rmtree(cache_folder() / "known-heads", ignore_errors=True)


def _share(folder: Path, **parts: Path) -> None:
    """Make `folder` a cache folder, with links to shared `parts` elsewhere."""
    (folder / "selfspec").mkdir(parents=True)
    for name, shared in parts.items():
        shared.mkdir(parents=True, exist_ok=True)
        (folder / "selfspec" / name).symlink_to(shared)


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    """The tiny Llama, float32, sdpa; shared by all tests, do not change it."""
    return make_model("llama")


@pytest.fixture(scope="session")
def exact() -> PreTrainedModel:
    """The same in float64, where rounding does not change tokens."""
    return make_model("llama", torch.float64)


@pytest.fixture(scope="session")
def backbone(model: PreTrainedModel) -> Backbone:
    """The tiny Llama as a backbone. It holds no state of its own, so all tests share it."""
    return Backbone(model)


@pytest.fixture
def precise() -> Backbone:
    """The same in float64, where tokens do not depend on how rows are computed."""
    return wrapped("llama", torch.float64)


@pytest.fixture(scope="session")
def default() -> Speculator:
    """The default model with its heads; tests pass options with each call."""
    return load(costs=CHEAP)
