"""Compiled code, weights in the layouts that it reads, and linear layers of both.

The C++ libraries come with the wheel, or the user's compiler makes them once. Weights stay blocks
of a GGUF file, or numbers of a mapped file, until other code needs them; copies for compiled code
are laid out for one pass over memory. A row's bits depend on the row alone.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import re
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, cached_property, partial
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from selfspec import files
from selfspec.errors import CannotWrite
from selfspec.files import cache_folder
from selfspec.model import compiler
from selfspec.model.compiler import MACROS, PANEL, SOURCE

logger = logging.getLogger(__name__)
_log_once = cache(logger.log)

# --- as many threads as there are free cores

_WINDOW_S = 0.06  # seconds of work, some twenty slices of a scheduler: less says little about load

_PAUSES = 2, 32
"""Wait before all threads are tried again, in lengths of the failed try: at first, and at most. It
doubles as long as cores stay busy."""


class Team:
    """Sets the number of threads that compute a round: at most the number of free cores.

    Threads synchronise several hundred times per token, and a waiting thread spins on its core, in
    torch's operators as in ours. Tokens/s beside 0, 1, 2 busy processes (default model, no drafts,
    two cores with AVX512-BF16): always two threads 142, 43, 35; always one 90, 84, 54; a team 150,
    87, 56. No bit depends on the number of threads.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.perf_counter,
        processor: Callable[[], float] = time.process_time,
        cores: int | None = None,
    ) -> None:
        """`wall` and `processor`: clocks, in seconds. `cores` None: those of `cores()`."""
        self._wall, self._processor = wall, processor
        self._cores = cores or files.cores()
        self._free_cores: int | None = None  # threads that have a free core each; None: all of them
        self._trying = False  # all threads again
        self._worked_s = self._processor_s = 0.0
        self._retry_at, self._pause = 0.0, _PAUSES[0]

    @property
    def crowded(self) -> bool:
        """Whether other programs occupy some of the threads' cores."""
        return self._free_cores is not None

    @property
    def threads(self) -> int:
        """The number of torch's threads to use now."""
        most = torch.get_num_threads()
        return min(most, self._cores, most if self._trying else self._free_cores or most)

    @contextmanager
    def limited(self) -> Iterator[None]:
        """For a round, set torch's number of threads to `threads`; then restore it."""
        most = torch.get_num_threads()
        if self.crowded and not self._trying and self._wall() >= self._retry_at:
            self._trying, self._worked_s, self._processor_s = True, 0.0, 0.0
        if (threads := self.threads) == most:
            yield
            return
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(most)

    @contextmanager
    def probed(self) -> Iterator[None]:
        """The same for work before the first round: a moment of torch's work is measured first.

        Loading the default model beside 2 busy processes, two cores: 2.8 s, with all threads 3.7.
        """
        with self.limited():
            if (threads := torch.get_num_threads()) > 1:
                rows = torch.zeros(threads << 16)  # a part for each thread
                with self.measured():
                    start = self._wall()
                    while self._wall() < start + _WINDOW_S:
                        rows.add_(1.0)
        with self.limited():
            yield

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure compiled layers: with a free core for each thread, all cores are busy."""
        start, processor_start = self._wall(), self._processor()
        yield
        end = self._wall()
        self._worked_s += end - start
        self._processor_s += self._processor() - processor_start
        if self._worked_s < _WINDOW_S:
            return
        threads, cores = torch.get_num_threads(), self._processor_s / self._worked_s
        all_threads = self._trying or not self.crowded  # no thread was left out
        # half a core short, or a quarter if there is one thread
        if cores < threads - min(threads / 4, 0.5) and (all_threads or threads > 1):
            self._free_cores = max(round(cores), 1)
            text = "other programs keep this machine busy: computing with %d of %d threads for now"
            if threads > 1:
                _log_once(logging.INFO, text, self._free_cores, threads)
            self._retry_at = end + self._pause * self._worked_s
            self._pause, self._trying = min(2 * self._pause, _PAUSES[1]), False
        elif all_threads:
            self._free_cores, self._trying, self._pause = None, False, _PAUSES[0]
        self._worked_s = self._processor_s = 0.0


TEAM = Team()  # one per process, since the threads are shared


@cache
def use_one_thread_after_fork() -> None:
    """Let forked processes compute with one thread: OpenMP would wait forever for the others."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))


# --- C++ libraries: from the wheel, or compiled here

DTYPES = (torch.float32, torch.bfloat16)  # read by compiled code; blocks are expanded to them


def compiled_library(source: Path, macro: str) -> ctypes.CDLL:
    """The library compiled from `source` with a macro: prebuilt if one fits, else compiled now.

    Prebuilt ones are in the folder `prebuilt` beside the source, others in the cache folder; if
    other users could write there, one is compiled for this process alone. Its threads are torch's
    own. Raises ValueError, with the reason, if there is none and none can be compiled.
    """
    try:
        prebuilt = _prebuilt_library(source, macro)
        return _cached_library(source, macro) if prebuilt is None else prebuilt[0]
    except (OSError, ValueError, subprocess.SubprocessError, CannotWrite) as error:
        reason = f"no compiled library: {error}"
        if isinstance(error, subprocess.CalledProcessError):
            lines = error.stderr.decode(errors="replace").strip().splitlines() or [str(error)]
            reason = next((line for line in lines if "error:" in line), lines[-1])
            reason = f"the compiler failed: {reason}"
        elif isinstance(error, FileNotFoundError) and error.filename == compiler.command()[0]:
            reason = f"no compiled library: there is no C++ compiler {error.filename}"
        _log_once(
            logging.WARNING,
            "%s. The model's own modules run: slower, and where two tokens are nearly as likely "
            "a draft may decide. Install a wheel that brings compiled code, or g++ 11 or newer",
            reason,
        )
        raise ValueError(reason) from error


def origin() -> str | None:
    """Where compiled code comes from: the wheel, a compiler, or None if from neither."""
    with suppress(ValueError):
        prebuilt = _prebuilt_library(compiler.SOURCE, compiler.MACROS[0])
        if prebuilt is not None:
            return f"in the wheel, for {prebuilt[1].name}"
    name = compiler.version()
    return name and f"here, by {name}"


def _prebuilt_library(source: Path, macro: str) -> tuple[ctypes.CDLL, compiler.Target] | None:
    """The fastest library compiled from this exact source that this processor runs."""
    folder = source.parent / "prebuilt"
    if not folder.is_dir():
        return None
    features = processor_features()
    for target in compiler.TARGETS.get(platform.machine(), ()):
        library = folder / compiler.library_name(source, macro, target)
        if lacking := target.needs - features:
            reason = f"this processor lacks {', '.join(sorted(lacking))}"
        elif not library.exists():
            reason = f"not in {folder}: the library there was made from another source"
        else:
            try:
                return _load(library), target
            except OSError as error:
                reason = str(error)
        logger.debug("%s is skipped: %s", library.name, reason)
    return None


def _cached_library(source: Path, macro: str) -> ctypes.CDLL:
    """A library from the cache folder, compiled if missing; incomplete files are never loaded.

    If the folder is not writable, or others could change it, one is compiled for this process.
    """
    target = compiler.this_machine(tiles=_tiles_allowed())
    name = compiler.library_name(source, macro, target)
    folder = cache_folder() / "compiled"
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = folder.resolve()  # follow links now, so that checks and writes see the same folder
    library, reason = folder / name, ""
    if not (_is_whole(library) or os.access(folder, os.W_OK)):
        reason = "it takes no files. Set XDG_CACHE_HOME to a folder that does"
    elif (path := files.unsafe_path(library)) is not None:
        reason = f"others can change {path}. Own it, and take away their write access: chmod go-w"
    if reason:
        text = "code in %s is not used but compiled again for each process: %s"
        _log_once(logging.WARNING, text, folder, reason)
        with tempfile.TemporaryDirectory() as scratch:
            compiler.make_library(Path(scratch) / name, source, macro, target)
            return _load(Path(scratch) / name)
    if not _is_whole(library):
        text = "compiling once for this processor, half a minute or more, into %s"
        _log_once(logging.WARNING, text, folder)
        with files.replacing(library, private=True) as file:
            compiler.make_library(file, source, macro, target)
    return _load(library)


def _is_whole(library: Path) -> bool:
    """Whether the file has its end, the ELF section table: loading a truncated one crashes."""
    with suppress(OSError, struct.error):
        kind, start, size, count = struct.unpack_from("<4s36xQ10xHH", data := library.read_bytes())
        return bool(kind != b"\x7fELF" or len(data) >= start + size * count)
    return False


def _load(library: Path) -> ctypes.CDLL:
    """Load a library with torch's OpenMP runtime: a second one would compete for the cores."""
    openmp = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    if not openmp:
        raise ValueError("this torch has no libgomp to share threads with")
    ctypes.CDLL(openmp[0].name, ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)  # makes its symbols visible
    return ctypes.CDLL(str(library))


def processor_features() -> set[str]:
    """The CPU features in Linux's names; AMX only if this process may use it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    facts = (line.partition(":") for line in lines)
    texts = (text for name, _, text in facts if name.strip() in ("flags", "Features"))
    features = set(next(texts, "").split())
    return features if _tiles_allowed() else features - {"amx_tile"}


@cache
def _tiles_allowed() -> bool:
    """Request the matrix registers (AMX) for this process from Linux; returns whether granted.

    A process that uses them without is killed; a container may refuse (Linux, x86/xstate.html).
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18  # Linux constants
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


# --- weights in a memory-mapped file

_PERMISSIONS = re.compile("r..p|r-.s")
"""Permissions of a mapping to which this process writes privately, or not at all."""


class FilePages:
    """The file mappings of this process that were never written to, when first needed."""

    @cached_property
    def _ranges(self) -> list[tuple[int, int]]:
        """First and last address of each file mapping without private pages."""
        ranges = list[tuple[int, int]]()
        with suppress(AttributeError, OSError, ValueError, psutil.Error):  # no readable /proc
            for area in psutil.Process().memory_maps(grouped=False):
                kept = area.anonymous or area.swap or not _PERMISSIONS.fullmatch(area.perms)
                if area.path.startswith("/") and not kept:  # releasing a private page would lose it
                    start, end = area.addr.split("-")
                    ranges.append((int(start, 16), int(end, 16)))
        return ranges

    def release(self, module: nn.Module) -> None:
        """Free the memory of a module's large parameters that are unchanged pages of a file."""
        for weight in module.parameters():
            weight = getattr(weight, "blocks", weight)
            start, end = weight.data_ptr(), weight.data_ptr() + weight.nbytes
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            size = end // mmap.PAGESIZE * mmap.PAGESIZE - first  # whole pages
            large = size >= 1 << 16 and weight.is_contiguous()  # else not worth the search
            if large and any(low <= start and end <= high for low, high in self._ranges):
                advise = ctypes.CDLL(None).madvise  # if the kernel refuses, they stay
                advise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


# --- weights as blocks of a file, expanded wherever numbers are needed

_UNCHANGEABLE = (
    "weights that are blocks of a file cannot be changed. Change a copy (copy.deepcopy), or load "
    "the model with executor='generic', which de-quantises it"
)
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]  # a descriptor


class Format(NamedTuple):
    """A weight format of ggml: integers, in blocks of neighbours in a row."""

    number: int  # its place in FORMATS of `weights.hpp`
    inputs: int  # of a block
    nbytes: int  # of a block
    scales: tuple[int, ...]  # offsets of float16 numbers in a block, in bytes


FORMATS: Mapping[str, Format] = {
    "Q4_0": Format(0, 32, 18, (0,)),
    "Q4_1": Format(1, 32, 20, (0, 2)),
    "Q4_K": Format(2, 256, 144, (0, 2)),
    "Q5_0": Format(3, 32, 22, (0,)),
    "Q8_0": Format(4, 32, 34, (0,)),
    "Q5_1": Format(5, 32, 24, (0, 2)),
    "Q5_K": Format(6, 256, 176, (0, 2)),
    "Q6_K": Format(7, 256, 210, (208,)),
}
"""Formats whose blocks are kept."""

ZEROED: Mapping[int, Format] = {4: Format(8, 32, 19, (0,)), 8: Format(9, 32, 35, (0,))}
"""By bits: Q4_0 and Q8_0 with a zero point, a byte after the scale that is also subtracted."""


class QuantisedWeight(Tensor):
    """Weights [out, in] kept as blocks; acts as the de-quantised tensor of its dtype."""

    blocks: Tensor  # [rows, bytes], uint8
    format: Format
    rows: Tensor  # [out], int64: the row of `blocks` for each output
    in_order: bool  # whether `rows` are all rows, in order
    plain: Tensor | None  # the expanded numbers, after `keep_numbers`
    inputs: int  # its second dimension: reading the tensor's shape takes longer
    numbers: torch.dtype  # its dtype, for the same reason
    expander: Any  # the compiled function

    @staticmethod
    def __new__(
        cls, blocks: Tensor, kind: Format, dtype: torch.dtype, rows: Tensor | None = None
    ) -> QuantisedWeight:
        """`rows`: default all, in order. Raises ValueError without compiled code."""
        inner, in_order = blocks.shape[1] // kind.nbytes * kind.inputs, rows is None
        rows = torch.arange(len(blocks)) if rows is None else rows
        self: QuantisedWeight = Tensor._make_wrapper_subclass(cls, (len(rows), inner), dtype=dtype)
        self.blocks, self.format, self.rows, self.plain = blocks, kind, rows, None
        self.inputs, self.numbers, self.in_order = inner, dtype, in_order
        self.expander = library(dtype).expand_blocks
        return self

    def __repr__(self) -> str:  # type: ignore[override]  # tensors take an option for contents
        return f"QuantisedWeight({list(self.shape)}, {self.dtype})"

    def __deepcopy__(self, _memo: object) -> nn.Parameter:
        """Return plain numbers, since a copy is made to be changed."""
        return nn.Parameter(self.expanded().clone(), requires_grad=False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle plain numbers, since addresses are not valid in another process."""
        return self.__deepcopy__({}).__reduce_ex__(protocol)

    def expanded(self, rows: Tensor | None = None) -> Tensor:
        """The numbers of all rows, or of `rows` [..], as a plain tensor; not to be changed."""
        if self.plain is not None:
            return self.plain if rows is None else self.plain[rows]
        places = self.rows if rows is None else self.rows[rows.flatten()]
        numbers = self._expand_rows(len(places), places.data_ptr())
        return numbers if rows is None else numbers.view(*rows.shape, self.inputs)

    def listed(self, rows: Sequence[int]) -> Tensor:
        """The same for rows that are on the host, [T, in]: one call instead of five of torch."""
        out_of_range = min(rows) < 0 or max(rows) >= len(self.blocks)  # torch raises for these
        if self.plain is not None or not self.in_order or out_of_range:
            return self.expanded(torch.tensor(rows))
        return self._expand_rows(len(rows), (ctypes.c_long * len(rows))(*rows))

    def _expand_rows(self, count: int, places: Any) -> Tensor:
        """Expand `count` rows; `places`: their rows in `blocks`, an address or an array."""
        numbers = torch.empty(count, self.inputs, dtype=self.numbers)
        blocks, target = self.blocks.data_ptr(), numbers.data_ptr()
        self.expander(self.format.number, self.inputs, count, places, blocks, target)
        return numbers

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Linear layers compute as with plain weights; embeddings expand only rows they need."""
        if func is torch.nn.functional.linear:
            return _linear(*args, **(kwargs or {}))
        if func is torch.nn.functional.embedding and isinstance(args[1], QuantisedWeight):
            return args[1].expanded(args[0])
        to_plain = func == _SET_DATA and not isinstance(args[1], QuantisedWeight)  # model.to(dtype)
        if to_plain or func is Tensor.share_memory_:  # would crash: the tensor has no storage
            raise RuntimeError(_UNCHANGEABLE)
        with torch._C.DisableTorchFunctionSubclass():  # else results would be made QuantisedWeights
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch calls it
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Give operators expanded numbers."""
        weight = args[0]
        if func in _SAME and isinstance(weight, QuantisedWeight):
            with torch.inference_mode(False):  # autograd counts changes of the tensors it returns
                alias = QuantisedWeight(weight.blocks, weight.format, weight.dtype, weight.rows)
                alias.plain, alias.in_order = weight.plain, weight.in_order
                return alias
        if func._schema.is_mutable and isinstance(weight, QuantisedWeight):
            raise RuntimeError(_UNCHANGEABLE)
        return func(*_expand(args), **_expand(dict(kwargs or {})))


def rows_of(weight: Tensor, rows: Tensor) -> Tensor:
    """Select rows of [out, in]; blocks stay blocks."""
    if not isinstance(weight, QuantisedWeight):
        return weight[rows]
    return QuantisedWeight(weight.blocks, weight.format, weight.dtype, weight.rows[rows])


def in_8_bits(weight: Tensor) -> Tensor:
    """Round plain weights [out, in] to Q8_0, where 32 neighbours of a row share a scale.

    Returns other weights unchanged: blocks, rows that are not multiples of 32, numbers beyond the
    range of float16. Raises ValueError without compiled code.
    """
    kind = FORMATS["Q8_0"]
    if isinstance(weight, QuantisedWeight) or weight.shape[1] % kind.inputs:
        return weight
    groups = weight.float().unflatten(1, (-1, kind.inputs))
    scales = (groups.abs().amax(-1, keepdim=True) / 127).half()
    if not bool(scales.isfinite().all()):
        return weight
    numbers = (groups / scales.float().clamp(min=1e-30)).round_().clamp_(-127, 127)
    parts = scales.view(torch.uint8), numbers.to(torch.int8).view(torch.uint8)
    return QuantisedWeight(torch.cat(parts, dim=-1).flatten(1), kind, weight.dtype)


def keep_numbers(model: nn.Module) -> None:
    """Expand all weights of `model` that are blocks, and keep the numbers for speed."""
    for weight in model.parameters():
        if isinstance(weight, QuantisedWeight):
            weight.plain = weight.expanded()


_PIECE = 1 << 22  # weights that are expanded at a time: they stay in caches and reuse memory


def _linear(input: Any, weight: Any, bias: Tensor | None = None) -> Tensor:  # noqa: A002  # torch's
    """The `linear` of torch; large weights are expanded, used and dropped piece by piece."""
    linear = torch.nn.functional.linear
    rows = max(1, _PIECE // weight.shape[1])
    x = _expand(input)
    if not isinstance(weight, QuantisedWeight) or weight.plain is not None or len(weight) <= rows:
        return linear(x, _expand(weight), bias)
    pieces = torch.arange(len(weight)).split(rows)
    parts = [
        linear(x, weight.expanded(piece), None if bias is None else bias[piece]) for piece in pieces
    ]
    return torch.cat(parts, dim=-1)


def _expand(values: Any) -> Any:
    return tree_map_only(QuantisedWeight, QuantisedWeight.expanded, values)


_SAME = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}

# --- panels of outputs, in stripes of one form


class _Stripe(ctypes.Structure):
    """The struct `Stripe` of `linear.hpp`: adjacent panels of one form."""

    _fields_ = (("panels", ctypes.c_long), ("form", ctypes.c_long), ("weights", ctypes.c_void_p))


@cache
def library(dtype: torch.dtype) -> ctypes.CDLL:
    """The kernels for numbers of `dtype`. Raises ValueError, with the reason, if there are none."""
    if dtype not in DTYPES:
        raise ValueError(f"compiled code reads float32 and bfloat16, not {dtype}")
    kernels = compiled_library(SOURCE, MACROS[dtype == torch.bfloat16])
    integer, pointer = ctypes.c_long, ctypes.c_void_p
    arguments = {"run": (1, 2), "pack": (2, 2), "linear_layer": (3, 4)}
    arguments |= dict.fromkeys(("pack_blocks", "expand_blocks"), (3, 3))
    for name, (integers, addresses) in arguments.items():
        function = getattr(kernels, name)
        function.argtypes, function.restype = (integer,) * integers + (pointer,) * addresses, None
    kernels.likeliest.argtypes = *(integer,) * 3, ctypes.c_float, *(pointer,) * 3
    kernels.likeliest.restype = None
    kernels.panel_bytes.argtypes, kernels.form_of.argtypes = (integer, integer), (integer,)
    kernels.panel_bytes.restype = kernels.form_of.restype = integer
    return kernels


def likeliest(
    logits: Tensor, temperature: float, count: int, ids: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """[n, V] -> [n, 2 * count]: the largest of softmax(logits / temperature), named by `ids` [V].

    First ids, then chances, descending; ties go to the first. `dtype`: that of the library to use.
    """
    rows, size = logits.shape
    logits, output = logits.contiguous(), logits.new_empty(rows, 2 * count)
    ids_address = None if ids is None else ids.data_ptr()
    addresses = logits.data_ptr(), ids_address, output.data_ptr()
    library(dtype).likeliest(rows, size, count, temperature, *addresses)
    return output


def has_bfloat16_dots() -> bool:
    """Whether this processor has bfloat16 dot products of pairs; else float32 is as fast."""
    return "avx512_bf16" in processor_features()


def why_not_compiled(dtype: torch.dtype) -> str | None:
    """Why there are no compiled linear layers for `dtype` here, or None."""
    try:
        library(dtype)
    except ValueError as error:
        return str(error)
    return None


def _in_stripes(weights: Sequence[Tensor], order: Tensor | None) -> list[Tensor]:
    """Stripes of the joined outputs: rows of one weight each if blocks can stay, else all."""
    if any(isinstance(weight, QuantisedWeight) for weight in weights):
        starts = [*accumulate(map(len, weights), initial=0)]
        places = torch.arange(starts[-1]) if order is None else order
        owners = torch.bucketize(places, torch.tensor(starts[1:]), right=True).tolist()
        runs = [(owner, len(list(run))) for owner, run in groupby(owners)]
        if not any(length % PANEL for _, length in runs[:-1]):
            parts = zip(runs, places.split([length for _, length in runs]), strict=True)
            return [rows_of(weights[at], rows - starts[at]) for (at, _), rows in parts]
    plain = [_expand(weight) for weight in weights]
    joined = torch.cat(plain) if len(plain) > 1 else plain[0]
    return [joined if order is None else joined[order]]


def in_panels(weights: Tensor) -> Tensor:
    """Copy plain weights [E, out, in] to panels, [E, ..]. ValueError without compiled code."""
    functions = library(weights.dtype)
    count, outputs, inner = weights.shape
    odd = inner % 2 if weights.dtype == torch.bfloat16 else 0
    panels = weights.new_empty(count, -(-outputs // PANEL) * PANEL * (inner + odd))
    for weight, target in zip(weights, panels, strict=True):
        weight = weight.contiguous()
        functions.pack(inner, outputs, weight.data_ptr(), target.data_ptr())
    return panels


def _panels(weight: Tensor) -> tuple[int, Tensor]:
    """The form of a stripe, as in `blocks.hpp`, 0 for plain numbers; and a copy of its panels."""
    if not isinstance(weight, QuantisedWeight):
        return 0, in_panels(weight[None])[0]
    functions, number, inner = library(weight.dtype), weight.format.number, weight.inputs
    size = -(-len(weight) // PANEL) * functions.panel_bytes(number, inner)
    panels = torch.empty(size, dtype=torch.uint8)
    rows, blocks = weight.rows, weight.blocks
    functions.pack_blocks(
        *(number, inner, len(rows), rows.data_ptr(), blocks.data_ptr(), panels.data_ptr())
    )
    return functions.form_of(number), panels


class CompiledLinear:
    """A compiled linear layer on a copy of weights in panels. ValueError without compiled code."""

    def __init__(
        self,
        weight: Tensor | Sequence[Tensor],
        bias: Tensor | None = None,
        order: Tensor | None = None,
    ) -> None:
        """`weight` [out, in], or several side by side; `order` [out] permutes outputs.

        Blocks stay blocks where whole panels have one format.
        """
        weights = [weight] if isinstance(weight, Tensor) else weight
        self.dtype, self.in_features = weights[0].dtype, weights[0].shape[1]
        self.out_features = sum(map(len, weights)) if order is None else len(order)
        self._panels, stripes = list[Tensor](), list[_Stripe]()
        for part in _in_stripes(weights, order):
            form, panels = _panels(part)
            self._panels.append(panels)
            stripes.append(_Stripe(-(-len(part) // PANEL), form, panels.data_ptr()))
        self.nbytes = sum(panels.nbytes for panels in self._panels)
        self._table = (_Stripe * len(stripes))(*stripes)
        self.address = ctypes.addressof(self._table)  # for `linear.hpp`; valid while this lives
        if bias is not None and order is not None:
            bias = bias[order]
        self.bias = None if bias is None else bias.contiguous()
        self._linear_layer = library(self.dtype).linear_layer

    @classmethod
    def of(cls, *parts: nn.Linear, order: Tensor | None = None) -> CompiledLinear:
        """Join layers side by side; `order` [out] permutes their outputs."""
        bias = None
        if any(part.bias is not None for part in parts):
            biases: list[Tensor] = [
                part.weight.new_zeros(part.out_features) if part.bias is None else part.bias
                for part in parts
            ]
            bias = torch.cat(biases).detach()
        return cls([part.weight.detach() for part in parts], bias, order)

    def __call__(self, rows: Tensor) -> Tensor:
        """[.., in] -> [.., out], both in the weight's dtype; ValueError for anything else."""
        if rows.dtype != self.dtype or rows.shape[-1] != self.in_features:  # else memory is misread
            raise ValueError(f"rows are {rows.dtype} {tuple(rows.shape)}, not of this layer")
        rows = rows.contiguous()
        outputs = rows.new_empty(*rows.shape[:-1], self.out_features)
        self._linear_layer(
            rows.numel() // self.in_features,
            self.in_features,
            self.out_features,
            rows.data_ptr(),
            self.address,
            None if self.bias is None else self.bias.data_ptr(),
            outputs.data_ptr(),
        )
        return outputs
