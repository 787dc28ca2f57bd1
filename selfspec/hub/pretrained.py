"""What transformers loads from a folder, hub id or GGUF file, and whether it may.

A config decides how much is built before any weight is read, so its counts are held against the
weights that are there. No pickles, no code of a model's author; transformers comes on first use.
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

from selfspec.errors import InvalidData, LacksWeights, ModelNotFound, described, first_line, shown
from selfspec.files import cache_folder, check_safetensors, read_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

# --- folders from outside: files of bounded size, whole weights

_MOST_BYTES = 256 << 20  # for a file of `_SMALL`; the largest known, of tokenizers, have a tenth
_OBJECTS = ("config.json", "generation_config.json", "tokenizer_config.json")
_SMALL = ("*.json", "*.jinja", "*.txt", "*.model")

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_SIZES = (*_LAYERS, "vocab_size", "hidden_size", "head_dim", "intermediate_size")
_MOST = 1 << 24  # beyond every model; some of what depends on sizes is built at once
_WIDEST = 8  # times the longest side of any weight: those of packed ones are shorter
_NUMBERS = ("F32", "BF16", "F16", "F64")
_MASKS = ("BOOL", "U8")
_WHOLE = ("position_ids", "num_batches_tracked")  # last names of old models' buffers
Shapes = dict[str, list[int]]  # of all tensors of a model, by name


def check_model_folder(folder: Path) -> Shapes:
    """Shapes of the weights. Raises InvalidData, with the reason, unless they may be loaded."""
    for file in (file for kind in _SMALL for file in folder.glob(kind)):
        if not file.is_file():
            raise InvalidData(f"{file} is no file")
        if file.stat().st_size > _MOST_BYTES:
            raise InvalidData(f"{file} has more than {_MOST_BYTES} bytes")
    configs = {name: read_json(folder / name) for name in _OBJECTS if (folder / name).exists()}
    for name, values in configs.items():
        if not isinstance(values, dict):
            held = described(type(values))
            raise InvalidData(f"{folder / name} holds {held}, expected an object")
    plain = configs["config.json"].get("quantization_config") is None
    shapes = {name: shape for file in weight_files(folder) for name, shape in _shapes(file, plain)}
    check_sizes(configs["config.json"], shapes)
    return shapes


def check_sizes(config: dict[str, Any], shapes: Shapes) -> None:
    """Raise InvalidData for a config of a model that these weights cannot be.

    Called with the file's own values, and with those that transformers adds to them: what is
    missing would be built at its default size, with random weights.
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
    one, path = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if one.is_file():
        return [one]
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
    """Names and shapes of all tensors; `plain`: nobody quantised them, so integers are no weights.

    Read as another type, their bytes would be other numbers.
    """
    for name, (dtype, shape) in check_safetensors(file).items():
        known = dtype in _NUMBERS or name.rpartition(".")[2] in _WHOLE
        if plain and not known and (name.endswith("weight") or dtype not in _MASKS):
            raise InvalidData(f"{file}: {name} holds {dtype}, expected {', '.join(_NUMBERS)}")
        yield name, shape


def _numbers(config: Any) -> Iterator[tuple[str, int]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield name, value


# --- loading, without transformers' bars and reports

_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")  # fetched of a model
_SHAPES_DIFFER = "ignore_mismatched_sizes"  # said of weights that do not fit their config


def load(source: str, **options: Any) -> tuple[Any, Any]:
    """Model and tokenizer from a folder or a hub id. Raises ModelNotFound with the reason."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    read: Any = AutoModelForCausalLM.from_pretrained  # typed as if it gave the model alone
    folder = Path(source)
    with _reading(f"cannot load {source}", bars=not folder.is_dir()):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        _require_known_method(getattr(config, "quantization_config", None))
        if folder.is_dir():
            check_sizes(config.to_dict(), check_model_folder(folder))
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        safe = {"use_safetensors": True, "trust_remote_code": False}
        model, found = read(source, output_loading_info=True, **safe, **options)
    _require_all(source, found)
    return model, tokenizer


def _require_all(source: object, found: dict[str, Any]) -> None:
    """Raise ModelNotFound for weights that transformers did not find, and made up."""
    if missing := sorted(found["missing_keys"]):
        raise ModelNotFound(
            f"{source} lacks {len(missing)} weights, {missing[0]} among them. Is the file whole?"
        )


@contextlib.contextmanager
def _reading(failed: str, *, bars: bool = False) -> Iterator[None]:
    """Quietly; an odd config makes transformers fail anywhere, with anything: ModelNotFound."""
    try:
        with quiet(bars=bars):
            yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # Rust's
            raise
        if getattr(error, "errno", 0) == errno.ENOSPC or "(os error 28)" in str(error):
            raise  # a tokenizer is written here, too: the cache is full, and the model sound
        reason = first_line(error)
        if _SHAPES_DIFFER in str(error):
            reason = "its weights have other shapes than its config says"
        if str(cache_folder() / "models") in failed:
            reason = f"{reason.rstrip('.,')}. Remove that folder: it is made again"
        raise ModelNotFound(f"{failed}: {reason}") from error


def _require_known_method(said: Any) -> None:
    """Raise InvalidData for a quantization_config that transformers would pass over."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as KNOWN

    if said is None:
        return
    if not isinstance(said, dict):
        held = described(type(said))
        raise InvalidData(f"its quantization_config holds {held}, expected an object")
    if said.get("load_in_8bit") or said.get("load_in_4bit"):
        return
    method = said.get("quant_method")
    if not isinstance(method, str) or method not in KNOWN:
        raise InvalidData(
            f"its quantization_config names {shown(method)}, which nothing here reads. Expected "
            "none, or for instance gptq, awq, compressed-tensors"
        )


def convert_gguf(gguf: Path, out: Path, dtype: str) -> None:
    """Write the model, de-quantised, and the tokenizer. Raises ModelNotFound with the reason."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    said = "de-quantising %s to %s, once, into %s. The weights keep their quantised values"
    logger.info(said, gguf.name, dtype, cache_folder() / "models")
    # dequantize=True drops the quantiser, which otherwise forbids save_pretrained
    options: dict[str, Any] = {"quantization_config": GgufConfig(dequantize=True)}
    options |= {"dtype": torch.float32, "output_loading_info": True}
    read: Any = AutoModelForCausalLM.from_pretrained  # typed as if it gave the model alone
    reader = _reader_with("tqdm", lambda bar: functools.partial(bar, disable=True))
    with _reading(f"cannot read {gguf} as GGUF"), reader:
        model, found = read(gguf.parent, gguf_file=gguf.name, **options)
        _write_tokenizer(gguf, out)
    _require_all(gguf, found)
    with quiet():
        model.to(getattr(torch, dtype)).save_pretrained(out)


def describe_gguf(gguf: Path, out: Path) -> None:
    """Write the config and the tokenizer of a file. Raises ModelNotFound with the reason."""
    from transformers import AutoConfig

    reader = _reader_with("load_gguf_checkpoint", _once)
    with _reading(f"cannot read {gguf} as GGUF"), reader:
        _write_tokenizer(gguf, out)
        AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


_READER = Lock()  # else two threads might each put back what the other had made


@contextlib.contextmanager
def _reader_with(name: str, made: Callable[[Any], Any]) -> Iterator[None]:
    """While open, `name` in transformers' reader of GGUF files is what is `made` of it."""
    with _READER, contextlib.ExitStack() as behind:
        with contextlib.suppress(ImportError, AttributeError):  # newer ones may go without
            from transformers import modeling_gguf_pytorch_utils as reader

            before = getattr(reader, name)
            behind.callback(setattr, reader, name, before)
            setattr(reader, name, made(before))
        yield


def _once(parse: Callable[..., Any]) -> Callable[..., Any]:
    """What is found in a file for its tokenizer's class serves its config, too.

    Either parses all words: of a vocabulary of 128,000, 8 s of a processor each time.
    """
    found = functools.cache(parse)
    return lambda *of, **options: copy.deepcopy(found(*of, **options))


def _write_tokenizer(gguf: Path, out: Path) -> None:
    """Raises ValueError for one that loses blanks or words: transformers 5.17 reads some so."""
    from tokenizers import decoders
    from transformers import AutoTokenizer, __version__

    made = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if "ByteLevel" in repr(made.backend_tokenizer.pre_tokenizer):
        # 5.17 decodes as SentencePiece first, and grammars then misread the blanks of tokens
        made.backend_tokenizer.decoder = decoders.ByteLevel()
    for name in ("bos_token", "eos_token", "pad_token"):  # for 5.17 Llama's first is the last, too
        if (place := made.init_kwargs.get(f"{name}_id")) is not None:
            setattr(made, name, made.convert_ids_to_tokens(place))
    made.save_pretrained(out)
    found, words = AutoTokenizer.from_pretrained(out), "one two"  # as it will be read
    ids = found(words)["input_ids"]
    lost = " " not in str(found.decode(ids, skip_special_tokens=True)).strip()  # Phi's
    if lost or (len(ids) >= len(words) and {"one", "▁one"} & found.get_vocab().keys()):  # Gemma's
        said = f"transformers {__version__} reads {words!r} as {found.convert_ids_to_tokens(ids)}"
        raise ValueError(f"{said}. A newer one may do better; else give the model's folder")


def load_description(folder: Path, name: str = "") -> tuple[Any, Any]:
    """Config and tokenizer. Raises ModelNotFound, saying that it cannot read `name`."""
    from transformers import AutoConfig, AutoTokenizer

    with _reading(f"cannot read {name or folder}"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        return config, AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def quantisation_of(source: str) -> Any:
    """The quantization_config of a folder or a hub id; None where it has none, or cannot be had."""
    from huggingface_hub import hf_hub_download

    folder = Path(source)
    try:
        file = folder if folder.is_dir() else Path(hf_hub_download(source, "config.json")).parent
        config = read_json(file / "config.json")
    except (OSError, ValueError, InvalidData):  # those of the hub are OSErrors and ValueErrors
        return None  # loading the model says what is wrong
    return config.get("quantization_config") if isinstance(config, dict) else None


def load_parts(source: str) -> tuple[Path, Any, Any, Any]:
    """Folder, config, tokenizer, and generation config if there is one. Raises ModelNotFound."""
    from huggingface_hub import snapshot_download
    from transformers import GenerationConfig

    folder = Path(source)
    with _reading(f"cannot load {source}"):
        if not folder.is_dir():
            folder = Path(snapshot_download(source, allow_patterns=list(_FILES)))
        shapes = check_model_folder(folder)
        config, tokenizer = load_description(folder)
        check_sizes(config.to_dict(), shapes)
        said = (folder / "generation_config.json").is_file()
        generation = GenerationConfig.from_pretrained(folder) if said else None
        return folder, config, tokenizer, generation


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


# --- a model whose weights somebody else brings

_OUTPUT = "lm_head.weight"


def assembled(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    attention: str | None,
    weight: Callable[[str, tuple[int, ...]], Tensor | None],
) -> PreTrainedModel:
    """The model that `config` describes, in evaluation mode, without memory of its own.

    `weight`: of a parameter's name and shape; None where there is none. Raises InvalidData where
    the config makes no model, LacksWeights where a weight is missing.
    """
    from accelerate import init_empty_weights
    from torch.nn import Parameter
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    make: Any = AutoModelForCausalLM.from_config  # untyped
    try:
        with init_empty_weights(include_buffers=False), no_init_weights():
            model: PreTrainedModel = make(config, dtype=dtype, attn_implementation=attention)
    except Exception as error:  # an odd config makes transformers fail anywhere, with anything
        raise InvalidData(f"what it says makes no model: {first_line(error)}") from error

    def place(name: str, parameter: nn.Parameter) -> None:
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._parameters[leaf] = parameter

    missing = []
    for name, shape in [(name, tuple(empty.shape)) for name, empty in model.named_parameters()]:
        if (found := weight(name, shape)) is None:
            missing.append(name)
        else:
            place(name, Parameter(found, requires_grad=False))
    for name in model.state_dict().keys() & dict(model.named_buffers()).keys():  # Gemma 4's scales
        buffer = model.get_buffer(name)
        if (found := weight(name, tuple(buffer.shape))) is None:
            missing.append(name)
        else:
            buffer.copy_(found)
    if config.tie_word_embeddings:
        missing = [name for name in missing if name != _OUTPUT]
        embedding: Any = model.get_input_embeddings()
        place(_OUTPUT, embedding.weight)
    if missing:
        raise LacksWeights(f"it lacks {len(missing)} weights, {missing[0]} among them")
    model.register_state_dict_post_hook(_as_numbers)
    model.eval()
    return model


def _as_numbers(_model: nn.Module, state: dict[str, Any], _prefix: str, _more: Any) -> None:
    """Blocks are saved as the numbers that they stand for, tied ones as one tensor."""
    from selfspec.model.weights import QuantisedWeight

    made: dict[int, Tensor] = {}
    for name, weight in state.items():  # with keep_vars they are parameters, as they are
        if isinstance(weight, QuantisedWeight) and not hasattr(weight, "_is_param"):
            state[name] = made.setdefault(weight.blocks.data_ptr(), weight.expanded())
