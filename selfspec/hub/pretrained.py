"""What transformers loads, without its bars and reports, and its errors in one line.

Comes in: a folder, hub id, or GGUF file. Goes out: model and tokenizer, or ModelNotFound with a
reason. No pickles, no code of a model's author. Called by `hub`; transformers comes on first use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from selfspec.errors import InvalidData, ModelNotFound, first_line
from selfspec.hub.model_folder import check_model_folder, check_sizes
from selfspec.typed import shown
from selfspec.untrusted import read_json

_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""Of a model on the hub."""

_SHAPES_DIFFER = "ignore_mismatched_sizes"
"""In what transformers says of weights whose shapes are not those of their config."""


def load(source: str, **options: Any) -> tuple[Any, Any]:
    """Model and tokenizer from a folder or a hub id. Raises ModelNotFound with the reason."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    read: Any = AutoModelForCausalLM.from_pretrained  # typed as if it gave the model alone
    folder = Path(source)
    try:
        with quiet(bars=not folder.is_dir()):
            config = AutoConfig.from_pretrained(source, trust_remote_code=False)
            _require_known_method(source, getattr(config, "quantization_config", None))
            if folder.is_dir():
                check_sizes(folder, config.to_dict(), check_model_folder(folder))
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
            model, found = read(
                source,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                **options,
            )
    except ModelNotFound:
        raise
    except Exception as error:  # an odd config makes transformers fail anywhere, with anything
        raise ModelNotFound(f"cannot load {source}: {_reason(error)}") from error
    if missing := sorted(found["missing_keys"]):
        raise ModelNotFound(
            f"{source} lacks {len(missing)} weights, {missing[0]} among them. Is the file whole?"
        )
    return model, tokenizer


def _require_known_method(source: str, said: Any) -> None:
    """Raise ModelNotFound for a quantization_config that transformers would pass over."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as KNOWN

    if not isinstance(said, dict) or said.get("load_in_8bit") or said.get("load_in_4bit"):
        return
    if (method := said.get("quant_method")) not in KNOWN:
        raise ModelNotFound(
            f"cannot load {source}: its quantization_config names {shown(method)}, which nothing "
            "here reads. Expected none, or for instance gptq, awq, compressed-tensors"
        )


def load_gguf(gguf: Path) -> tuple[Any, Any]:
    """Model, de-quantised to float32, and tokenizer. Raises ModelNotFound with the reason."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, name = str(gguf.parent), gguf.name
    # dequantize=True drops the quantiser, which otherwise forbids save_pretrained
    options: dict[str, Any] = {"quantization_config": GgufConfig(dequantize=True)}
    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=name, dtype=torch.float32, **options
            )
            return model, AutoTokenizer.from_pretrained(folder, gguf_file=name)
    except Exception as error:  # as above: the file says what is built
        raise ModelNotFound(f"cannot read {gguf} as GGUF: {_reason(error)}") from error


def describe_gguf(gguf: Path, out: Path) -> None:
    """Write the config and the tokenizer of a file. Raises ModelNotFound with the reason."""
    from transformers import AutoConfig, AutoTokenizer

    folder, name = str(gguf.parent), gguf.name
    try:
        with quiet():
            AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)
            AutoConfig.from_pretrained(folder, gguf_file=name).save_pretrained(out)
    except Exception as error:  # as above
        raise ModelNotFound(f"cannot read {gguf} as GGUF: {_reason(error)}") from error


def load_description(folder: Path) -> tuple[Any, Any]:
    """Config and tokenizer that `describe_gguf` wrote."""
    from transformers import AutoConfig, AutoTokenizer

    with quiet():
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        return config, AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def quantisation_of(source: str) -> Any:
    """The quantization_config of a folder or a hub id; None where it has none, or cannot be had."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    folder = Path(source)
    try:
        file = folder if folder.is_dir() else Path(hf_hub_download(source, "config.json")).parent
        config = read_json(file / "config.json")
    except (OSError, InvalidData, HfHubHTTPError, HFValidationError):
        return None  # whoever loads the model says what is wrong
    return config.get("quantization_config") if isinstance(config, dict) else None


def load_parts(source: str) -> tuple[Path, Any, Any, Any]:
    """A folder with all files, its config, tokenizer and generation config, if it has one.

    Raises ModelNotFound with the reason.
    """
    from huggingface_hub import snapshot_download
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    try:
        folder = Path(source)
        if not folder.is_dir():
            folder = Path(snapshot_download(source, allow_patterns=list(_FILES)))
        with quiet():
            shapes = check_model_folder(folder)
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            check_sizes(folder, config.to_dict(), shapes)
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            said = (folder / "generation_config.json").is_file()
            return (
                folder,
                config,
                tokenizer,
                GenerationConfig.from_pretrained(folder) if said else None,
            )
    except ModelNotFound:
        raise
    except Exception as error:  # as above
        raise ModelNotFound(f"cannot load {source}: {_reason(error)}") from error


@contextlib.contextmanager
def quiet(*, bars: bool = False) -> Iterator[None]:
    """Switch off what transformers says, its bars too unless asked; then back to what it was."""
    from transformers.utils import logging as transformers_logging

    control: Any = transformers_logging  # its functions carry no types
    level, shown = control.get_verbosity(), control.is_progress_bar_enabled()
    control.set_verbosity(control.CRITICAL)
    if not bars:
        control.disable_progress_bar()
    try:
        yield
    finally:
        control.set_verbosity(level)
        if shown:
            control.enable_progress_bar()


def _reason(error: Exception) -> str:
    """What went wrong; where transformers only names a switch, what it is about."""
    if _SHAPES_DIFFER in str(error):
        return "its weights have other shapes than its config says"
    return first_line(error)
