"""Models from quantised files: their weights as they lie there, or de-quantised once.

Comes in: a GGUF file, or a folder that GPTQ, AWQ or compressed-tensors wrote. Goes out: model and
tokenizer, or a folder of the cache that transformers loads. Called by `hub.models`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from selfspec import files
from selfspec.errors import CannotWrite, InvalidData, LacksWeights, ModelNotFound, first_line
from selfspec.hub import pretrained
from selfspec.hub.gguf_header import read_header

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_STORED = ("bfloat16", "float16", "float32")  # other dtypes are converted as they are loaded
_CONVERSION = b"1"  # raise it when _made_once writes other files: old cache entries are then unused


def from_folder(
    source: str, dtype: torch.dtype, attention: str, *, free: bool, blocks: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase] | None:
    """Model and tokenizer of a folder or hub id that a known method quantised, else None.

    `free`: whether another dtype may be taken. `blocks`: whether weights may stay as they are.
    Raises ModelNotFound for damaged files.
    """
    if not isinstance(said := pretrained.quantisation_of(source), dict):
        return None
    import torch

    from selfspec.hub import grouped
    from selfspec.model.weights import DTYPES, blocks_pay, can_compile

    try:
        method = grouped.method_of(said)
    except ValueError as why:
        logger.info("%s is left to transformers: %s", source, why)
        return None
    blocks = blocks and dtype in DTYPES and can_compile(dtype)
    if blocks and free and not blocks_pay(dtype):
        dtype = torch.float32
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
    kept = "as blocks" if blocks else "as numbers"
    logger.debug("%s: weights are kept %s, products in %s", source, kept, dtype)
    return model, tokenizer


def from_gguf(
    gguf: Path, dtype: torch.dtype, attention: str, *, free: bool, device: torch.device | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase] | None:
    """Model and tokenizer, its weights as they lie in the file; None where that cannot be had.

    `free`: whether another dtype may be taken. Raises ModelNotFound for damaged files.
    """
    import torch

    from selfspec.hub import gguf_blocks
    from selfspec.model.weights import blocks_pay

    with _naming(gguf):
        header = read_header(gguf)
        if (why := gguf_blocks.why_not(header, dtype, device)) is not None:
            logger.info("%s is de-quantised: %s", gguf.name, why)
            return None
        if free and not blocks_pay(dtype):
            dtype = torch.float32
        gguf_blocks.check_scales(gguf, header)  # before the tokenizer is read, which takes long
        description = _made_once(gguf, "description", pretrained.describe_gguf)
        config, tokenizer = pretrained.load_description(description)
        model = gguf_blocks.load(gguf, header, config, dtype, attention)
    logger.debug("%s: weights stay as blocks of the file, products in %s", gguf.name, dtype)
    return model, tokenizer


def de_quantised(path: Path, dtype: str) -> Path:
    """The de-quantised copy of a GGUF file, made now unless the cache folder has it.

    Raises ModelNotFound for damaged files, and where there is no room.
    """
    stored = dtype if dtype in _STORED else "float32"

    def make(gguf: Path, new: Path) -> None:
        logger.info(
            "de-quantising %s to %s, once, into %s. The weights keep their quantised values",
            gguf.name,
            stored,
            new.parent,
        )
        _convert(gguf, new, stored)

    with _naming(path):
        return _made_once(path, stored, make)


def _digest(path: Path) -> str:
    """Sha256 of the file: 0.05 s for the default model, and the same in every environment."""
    digest = hashlib.sha256(_CONVERSION)
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise ModelNotFound(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()


def _made_once(gguf: Path, kind: str, make: Callable[[Path, Path], None]) -> Path:
    """A folder of the cache that `make` fills: whole or not at all, by the first of several."""
    target = files.cache_folder() / "models" / f"{gguf.stem}-{_digest(gguf)[:12]}-{kind}"
    if (target / "config.json").is_file():
        return target
    read_header(gguf)
    with files.locked(target, wait=True):
        if not (target / "config.json").is_file():
            with files.replacing_folder(target) as new:
                make(gguf, new)
    return target


@contextlib.contextmanager
def _naming(gguf: Path) -> Iterator[None]:
    """What goes wrong inside, in one line about this file: ModelNotFound."""
    try:
        yield
    except InvalidData as error:
        raise ModelNotFound(f"cannot load {gguf}: {error}") from error
    except CannotWrite as error:
        raise ModelNotFound(
            f"cannot write the de-quantised model: {first_line(error.__cause__ or error)}. "
            "Set XDG_CACHE_HOME to a folder with room for it"
        ) from error


def _convert(gguf: Path, out: Path, dtype: str) -> None:
    """Read a GGUF file, write it as safetensors in `dtype` with config and tokenizer."""
    import torch

    model, tokenizer = pretrained.load_gguf(gguf)
    with pretrained.quiet():
        model.to(getattr(torch, dtype)).save_pretrained(out)
        tokenizer.save_pretrained(out)
