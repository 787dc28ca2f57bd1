"""Load models with transformers from a folder, hub id or GGUF file, after checking them.

A config decides how much is built before any weight is read, so its sizes are checked against the
weights. No pickles, no code of a model's author; transformers is imported on first use.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from selfspec.errors import InvalidData, LacksWeights, ModelNotFound, first_line, hint_name, shown
from selfspec.files import cache_folder, check_safetensors, read_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

# --- untrusted folders: files of bounded size, whole weights

_MOST_BYTES = 256 << 20  # in a file of `_SMALL`; the largest known tokenizers have a tenth
_OBJECTS = ("config.json", "generation_config.json", "tokenizer_config.json")
_SMALL = ("*.json", "*.jinja", "*.txt", "*.model")

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_SIZES = (*_LAYERS, "vocab_size", "hidden_size", "head_dim", "intermediate_size")
_MOST = 1 << 24  # more than in any model; some sizes are allocated at once
_WIDEST = 8  # times the longest dimension of any weight: those of packed weights are shorter
_NUMBERS = ("F32", "BF16", "F16", "F64")
_MASKS = ("BOOL", "U8")
_WHOLE = ("position_ids", "num_batches_tracked")  # integer buffers of old models
Shapes = dict[str, list[int]]  # of all tensors of a model, by name


def check_model_folder(folder: Path) -> Shapes:
    """Check a folder; returns its weights' shapes. Raises InvalidData if it must not be loaded."""
    for file in (file for kind in _SMALL for file in folder.glob(kind)):
        if not file.is_file():
            raise InvalidData(f"{file} is no file")
        if file.stat().st_size > _MOST_BYTES:
            raise InvalidData(f"{file} has more than {_MOST_BYTES} bytes")
    configs = {name: read_json(folder / name) for name in _OBJECTS if (folder / name).exists()}
    for name, values in configs.items():
        if not isinstance(values, dict):
            kind = hint_name(type(values))
            raise InvalidData(f"{folder / name} holds {kind}, expected an object")
    plain = configs["config.json"].get("quantization_config") is None
    shapes = {name: shape for file in weight_files(folder) for name, shape in _shapes(file, plain)}
    check_sizes(configs["config.json"], shapes)
    return shapes


def check_sizes(config: dict[str, Any], shapes: Shapes) -> None:
    """Raise InvalidData if the sizes in a config do not fit the weights.

    Called with the file's own values, and again with the defaults that transformers adds to them: a
    missing size would be built at its default, with random weights.
    """
    lengths = {length for shape in shapes.values() for length in shape}
    longest = min(_MOST, _WIDEST * max(lengths, default=_MOST))
    for name, value in _numbers(config):
        most = longest if name not in _LAYERS else len(shapes) or _MOST
        if name in _SIZES and not 1 <= value <= most:
            raise InvalidData(f"its config has {name} {value}, which its weights have not")
    text = config.get("text_config")
    width = (text if isinstance(text, dict) else config).get("hidden_size")
    if isinstance(width, int) and lengths and width not in lengths:
        raise InvalidData(f"none of its weights has hidden_size {width}")


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers reads: one, those of an index, or all. Raises InvalidData."""
    file, path = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if file.is_file():
        return [file]
    if not path.exists():
        return sorted(folder.glob("*.safetensors"))
    index = read_json(path)
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise InvalidData(f"{path} has no weight_map of names")
    for name in sorted(set(names.values())):
        plain = name.endswith(".safetensors") and Path(name).name == name
        if not (plain and (folder / name).is_file()):
            raise InvalidData(
                f"{path} names {shown(name)}, which is no .safetensors file beside it"
            )
    return [folder / name for name in sorted(set(names.values()))]


def _shapes(file: Path, plain: bool) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of all tensors; `plain`: they are not quantised, so integers are no weights.

    Integer weights would be read as wrong numbers.
    """
    for name, (dtype, shape) in check_safetensors(file).items():
        known = dtype in _NUMBERS or name.rpartition(".")[2] in _WHOLE
        if plain and not known and (name.endswith("weight") or dtype not in _MASKS):
            error = f"{file}: {name} holds {dtype}, expected {', '.join(_NUMBERS)}"
            if file.with_name("quantize_config.json").exists():  # an old GPTQ folder
                error += '. Copy quantize_config.json into config.json, as "quantization_config"'
            raise InvalidData(error)
        yield name, shape


def _numbers(config: Any) -> Iterator[tuple[str, int]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield name, value


# --- loading, without transformers' bars and reports

_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")  # fetched for a model
_SHAPES_DIFFER = "ignore_mismatched_sizes"  # in the error for weights that do not fit a config


def load(source: str, **options: Any) -> tuple[Any, Any]:
    """Model and tokenizer from a folder or a hub id. Raises ModelNotFound with the reason."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    read: Any = AutoModelForCausalLM.from_pretrained  # typed as if it gave the model alone
    folder = Path(source)
    with _explain_errors(f"cannot load {source}", bars=not folder.is_dir()):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        _require_known_method(getattr(config, "quantization_config", None))
        if folder.is_dir():
            check_sizes(config.to_dict(), check_model_folder(folder))
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        safe = {"use_safetensors": True, "trust_remote_code": False}
        model, info = read(source, output_loading_info=True, **safe, **options)
    _require_weights(source, info)
    return model, tokenizer


def _require_weights(source: object, info: dict[str, Any]) -> None:
    """Raise ModelNotFound for weights that transformers did not find, and made at random."""
    if missing := sorted(info["missing_keys"]):
        raise ModelNotFound(
            f"{source} lacks {len(missing)} weights, {missing[0]} among them. Is the file whole?"
        )


@contextlib.contextmanager
def _explain_errors(failure: str, *, bars: bool = False) -> Iterator[None]:
    """Silence transformers, and turn its errors (any class, for odd files) into ModelNotFound."""
    try:
        with quiet_transformers(bars=bars):
            yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # Rust's
            raise
        if getattr(error, "errno", 0) == errno.ENOSPC or "(os error 28)" in str(error):
            raise  # the disk of the cache is full: the model is not at fault
        reason = first_line(error)
        if _SHAPES_DIFFER in str(error):
            reason = "its weights have other shapes than its config says"
        if str(cache_folder() / "models") in failure:
            reason = f"{reason.rstrip('.,')}. Remove that folder: it is made again"
        raise ModelNotFound(f"{failure}: {reason}") from error


def _require_known_method(config: Any) -> None:
    """Raise InvalidData for a quantization_config that transformers would ignore."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as KNOWN

    if config is None:
        return
    if not isinstance(config, dict):
        kind = hint_name(type(config))
        raise InvalidData(f"its quantization_config holds {kind}, expected an object")
    if config.get("load_in_8bit") or config.get("load_in_4bit"):
        return
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in KNOWN:
        raise InvalidData(
            f"its quantization_config names {shown(method)}, which is not supported. Expected "
            "none, or for instance gptq, awq, compressed-tensors"
        )


def convert_gguf(gguf: Path, out: Path, dtype: str) -> None:
    """Write the de-quantised model and its tokenizer. Raises ModelNotFound with the reason."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    message = "de-quantising %s to %s, once, into %s. The weights keep their quantised values"
    logger.info(message, gguf.name, dtype, cache_folder() / "models")
    # dequantize=True drops the quantiser, which otherwise forbids save_pretrained
    options: dict[str, Any] = {"quantization_config": GgufConfig(dequantize=True)}
    options |= {"dtype": torch.float32, "output_loading_info": True}
    read: Any = AutoModelForCausalLM.from_pretrained  # typed as if it gave the model alone
    with _explain_errors(f"cannot read {gguf} as GGUF"), _quick_reader():
        model, info = read(gguf.parent, gguf_file=gguf.name, **options)
        _write_tokenizer(gguf, out)
    _require_weights(gguf, info)
    with quiet_transformers():
        model.to(getattr(torch, dtype)).save_pretrained(out)


def describe_gguf(gguf: Path, out: Path) -> None:
    """Write the config and the tokenizer of a file. Raises ModelNotFound with the reason."""
    from transformers import AutoConfig

    with _explain_errors(f"cannot read {gguf} as GGUF"), _quick_reader():
        _write_tokenizer(gguf, out)
        AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


_READER = Lock()  # else one thread could restore the replacement that another one made


@contextlib.contextmanager
def _quick_reader() -> Iterator[None]:
    """Let transformers' GGUF reader parse a vocabulary once, and silently, during the block."""
    with _READER, contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, AttributeError):  # newer ones may lack a name
            import gguf
            from transformers import modeling_gguf_pytorch_utils as reader

            for owner, name, wrap in (
                (gguf, "GGUFReader", _with_plain_slices),
                (gguf, "get_tensor_name_map", functools.cache),  # else it is made for each module
                (reader, "load_gguf_checkpoint", _cache_results),
                (reader, "tqdm", lambda bar: functools.partial(bar, disable=True)),
            ):
                stack.callback(setattr, owner, name, original := getattr(owner, name))
                setattr(owner, name, wrap(original))
        yield


def _with_plain_slices(kind: Any) -> Any:
    """A reader of an array over its memory map, whose slices, one a token, cost a third."""

    def keep(reader: Any, mapped: Any) -> None:
        vars(reader)["data"] = mapped.view(type(mapped).__base__)

    return type(kind.__name__, (kind,), {"data": property(lambda one: vars(one)["data"], keep)})


def _cache_results(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Cache the results of `parse`, except tensors."""
    cached = functools.cache(parse)

    def read(*args: Any, **options: Any) -> Any:
        large = options.get("return_tensors")
        return parse(*args, **options) if large else copy.deepcopy(cached(*args, **options))

    return read


def _write_tokenizer(gguf: Path, out: Path) -> None:
    """Write a tokenizer. Raises ValueError if it loses spaces or words, as some do with 5.17."""
    from tokenizers import decoders
    from transformers import AutoTokenizer, __version__

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if "ByteLevel" in repr(tokenizer.backend_tokenizer.pre_tokenizer):
        # 5.17 decodes as SentencePiece first, and grammars then misread the spaces of tokens
        tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    for name in ("bos_token", "eos_token", "pad_token"):  # 5.17 takes Llama's first as last, too
        if (token_id := tokenizer.init_kwargs.get(f"{name}_id")) is not None:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(token_id))
    tokenizer.save_pretrained(out)
    saved, text = AutoTokenizer.from_pretrained(out), "one two"  # as it will be read
    ids = saved(text)["input_ids"]
    lost = " " not in str(saved.decode(ids, skip_special_tokens=True)).strip()  # Phi's
    if lost or (len(ids) >= len(text) and {"one", "▁one"} & saved.get_vocab().keys()):  # Gemma's
        reason = f"transformers {__version__} reads {text!r} as {saved.convert_ids_to_tokens(ids)}"
        raise ValueError(f"{reason}. A newer version may be right; else give the model's folder")


def load_description(folder: Path, name: str = "") -> tuple[Any, Any]:
    """Load config and tokenizer. Raises ModelNotFound, which says that `name` cannot be read."""
    from transformers import AutoConfig, AutoTokenizer

    with _explain_errors(f"cannot read {name or folder}"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        return config, AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def quantisation_of(source: str) -> Any:
    """The quantization_config of a folder or a hub id; None if it is missing or out of reach."""
    from huggingface_hub import hf_hub_download

    path = Path(source)
    try:
        folder = path if path.is_dir() else Path(hf_hub_download(source, "config.json")).parent
        config = read_json(folder / "config.json")
    except (OSError, ValueError, InvalidData):  # those of the hub are OSErrors and ValueErrors
        return None  # loading the model reports the error
    return config.get("quantization_config") if isinstance(config, dict) else None


def load_parts(source: str) -> tuple[Path, Any, Any, Any]:
    """Load folder, config, tokenizer, and generation config if any. Raises ModelNotFound."""
    from huggingface_hub import snapshot_download
    from transformers import GenerationConfig

    folder = Path(source)
    with _explain_errors(f"cannot load {source}"):
        if not folder.is_dir():
            folder = Path(snapshot_download(source, allow_patterns=list(_FILES)))
        shapes = check_model_folder(folder)
        config, tokenizer = load_description(folder)
        check_sizes(config.to_dict(), shapes)
        has_generation = (folder / "generation_config.json").is_file()
        generation = GenerationConfig.from_pretrained(folder) if has_generation else None
        return folder, config, tokenizer, generation


@contextlib.contextmanager
def quiet_transformers(*, bars: bool = False) -> Iterator[None]:
    """Silence transformers' log, and its progress bars unless `bars`, during the block."""
    from transformers.utils import logging as transformers_logging

    control: Any = transformers_logging  # its functions carry no types
    level, had_bars = control.get_verbosity(), control.is_progress_bar_enabled()
    control.set_verbosity(control.CRITICAL)
    if not bars:
        control.disable_progress_bar()
    try:
        yield
    finally:
        control.set_verbosity(level)
        if had_bars:
            control.enable_progress_bar()


# --- a model built from given weights

_OUTPUT = "lm_head.weight"


def assemble(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    attention: str | None,
    weight: Callable[[str, tuple[int, ...]], Tensor | None],
) -> PreTrainedModel:
    """Build the model that `config` describes from given weights, in evaluation mode.

    `weight` returns the tensor for a parameter's name and shape, or None if there is none. Raises
    InvalidData if the config describes no model, LacksWeights if a weight is missing.
    """
    from accelerate import init_empty_weights
    from torch.nn import Parameter
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    make: Any = AutoModelForCausalLM.from_config  # untyped
    try:
        with init_empty_weights(include_buffers=False), no_init_weights():
            model: PreTrainedModel = make(config, dtype=dtype, attn_implementation=attention)
    except Exception as error:  # with an odd config, transformers may raise anything
        raise InvalidData(f"its config describes no model: {first_line(error)}") from error

    def place(name: str, parameter: nn.Parameter) -> None:
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._parameters[leaf] = parameter

    missing = []
    for name, shape in [(name, tuple(empty.shape)) for name, empty in model.named_parameters()]:
        if (tensor := weight(name, shape)) is None:
            missing.append(name)
        else:
            place(name, Parameter(tensor, requires_grad=False))
    for name in model.state_dict().keys() & dict(model.named_buffers()).keys():  # Gemma 4's scales
        buffer = model.get_buffer(name)
        if (tensor := weight(name, tuple(buffer.shape))) is None:
            missing.append(name)
        else:
            buffer.copy_(tensor)
    if config.tie_word_embeddings:
        missing = [name for name in missing if name != _OUTPUT]
        embedding: Any = model.get_input_embeddings()
        place(_OUTPUT, embedding.weight)
    if missing:
        raise LacksWeights(f"it lacks {len(missing)} weights, {missing[0]} among them")
    model.register_state_dict_post_hook(_as_numbers)
    model.eval()
    return model


def _as_numbers(_model: nn.Module, state: dict[str, Any], _prefix: str, _metadata: Any) -> None:
    """Replace blocks in a state dict by their numbers, tied ones by one tensor."""
    from selfspec.model.weights import QuantisedWeight

    numbers: dict[int, Tensor] = {}
    for name, weight in state.items():  # with keep_vars they stay parameters
        if isinstance(weight, QuantisedWeight) and not hasattr(weight, "_is_param"):
            state[name] = numbers.setdefault(weight.blocks.data_ptr(), weight.expanded())
