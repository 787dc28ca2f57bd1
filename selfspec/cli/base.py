"""Code that the commands share: flags, config files, models, prompts, output, a progress bar.

A command receives its options as one mapping from flag names to values, without the options that
are not given. Results go to standard output through `emit`, all else to standard error.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import inspect
import io
import itertools
import json
import logging
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, TypeVar, get_args, get_origin

import typer
from typer.core import TyperCommand

from selfspec import config, files
from selfspec import options as parts
from selfspec.api.chat_template import advice
from selfspec.api.chat_template import read as read_template
from selfspec.cli import interrupts
from selfspec.config import OPTION_NAMES, SpeculationOptions
from selfspec.decoding.stats import counted
from selfspec.errors import (
    InvalidData,
    InvalidOption,
    InvalidPrompt,
    SelfspecError,
    annotations_of,
    check_keys,
    first_line,
)
from selfspec.heads.folder import known_folders, read_config
from selfspec.hub import models as hub
from selfspec.options import PARTS, Kinds, Part, as_word, check_ranges, members, merge_values, parse

if TYPE_CHECKING:
    from rich.table import Table

    from selfspec.api.speculator import Speculator
    from selfspec.api.stream import Generation

Args = dict[str, Any]  # a command's options by flag name; typed and checked


class Given(Args):
    """Options, and the `names` of those from flags or --config, not from the default file."""

    names: frozenset[str] = frozenset()


Command = Callable[..., None]
Options = TypeVar("Options")

_keyword = functools.partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
_parsed: Any = functools.cache(lambda module: ast.parse(inspect.getsource(sys.modules[module])))

logger = logging.getLogger(__name__)


def selfspec(
    context: typer.Context,
    *,
    version: Annotated[bool, typer.Option("--version", "-V", help="Print the version.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No notices and no progress; errors only.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more details.")] = False,
    debug: Annotated[  # noqa: ARG001  # read by main(), listed here for --help
        bool, typer.Option("--debug", help="Show tracebacks.")
    ] = False,
) -> None:
    """Make a Hugging Face model generate faster, with the same text and without a second model.

    --quiet, --verbose and --debug may appear anywhere. Environment variables can set flags:
    SELFSPEC_MODEL sets --model, SELFSPEC_CONFIG sets --config.

    Exit codes: 0 done, 1 a check failed, 2 bad input, 70 a bug in selfspec, 130 stopped by Ctrl-C,
    141 the output's reader has gone.
    """
    if quiet and verbose:
        raise InvalidOption("--quiet and --verbose at once. Leave one of them out")
    handler = logging.StreamHandler()
    can_move = sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    erase = "\r\x1b[K" if can_move else ""  # the status line on a terminal
    handler.setFormatter(logging.Formatter(f"{erase}selfspec: %(message)s"))
    package = logging.getLogger("selfspec")
    package.setLevel(logging.ERROR if quiet else logging.DEBUG if verbose else logging.INFO)
    package.handlers[:] = [handler]
    if version:
        emit(metadata.version("selfspec") + "\n")
    elif context.invoked_subcommand is None:
        emit(context.get_help() + "\n")


# --- flags


@dataclass(frozen=True)
class Flag:
    """A command-line option that is also a YAML key.

    It has no default of its own, so that the precedence flag > environment > YAML file > default
    file > heads > built-in holds.
    """

    name: str  # keyword of the Python API; the flag is this name in kebab-case
    hint: Any  # type of the value, as annotated in Python
    help: str
    aliases: tuple[str, ...] = ()
    metavar: str | None = None  # the value's placeholder in the help; None: by its type
    group: str = "Options"  # its heading in the help
    rare: bool = False  # listed by --help-all only

    @property
    def long_name(self) -> str:
        return "--" + self.name.replace("_", "-")

    def parameter(self) -> inspect.Parameter:
        """The parameter that typer reads; its value is None where the flag is not given."""
        kinds = members(self.hint)
        option = typer.Option(
            self.long_name + (f"/--no-{self.long_name[2:]}" if kinds[0] is bool else ""),
            *self.aliases,
            help=self.help,
            metavar=self.metavar or _metavar(self.hint, ","),
            hidden=self.rare,
            envvar=f"SELFSPEC_{self.name.upper()}",
            show_envvar=False,
            rich_help_panel=self.group,
        )
        kind = str if any(get_origin(kind) is tuple for kind in kinds) else kinds[0]
        if get_origin(kind) is list:
            option.callback = _split_lines
        return _keyword(self.name, default=None, annotation=Annotated[kind | None, option])


def _split_lines(context: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
    """Split an environment variable at newlines; typer splits at blanks, which stops may hold."""
    source = context.get_parameter_source(str(parameter.name))
    from_env = source is not None and source.name == "ENVIRONMENT"
    return os.environ[str(parameter.envvar)].splitlines() if from_env else value


def option_flags(options: type, names: Iterable[str] | None = None) -> tuple[Flag, ...]:
    """Make a flag for each field of an option dataclass, or for `names`; docstrings are the help.

    Options with settings of their own are text on the command line, and text or a mapping in YAML.
    """
    hints, texts, built_in = annotations_of(options), docstrings(options), options()
    flags = []
    for name in names or [field.name for field in fields(options)]:
        default, hint, text, metavar = getattr(built_in, name), hints[name], texts[name], None
        if name in PARTS:
            hint = str | dict
            metavar = "KEY=VALUE,.." if "" in PARTS[name] else "KIND[:KEY=VALUE,..]"
        if isinstance(default, Part):
            default = default.kind if default.kind != name else None
        if default is not None and hint is not bool:
            text = f"{text} Default: {default}."
        flags.append(Flag(name, hint, text, metavar=metavar))
    return tuple(flags)


def group_flags(group: str, usual: Collection[str], *flags: Flag) -> tuple[Flag, ...]:
    """Put `flags` under one heading; --help lists only the `usual` ones."""
    return tuple(replace(flag, group=group, rare=flag.name not in usual) for flag in flags)


Prompt = Annotated[
    str | None, typer.Argument(metavar="PROMPT", help="The prompt. Default: standard input.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing output.")]

RAW = Flag("raw", bool, "Continue the prompt, without a chat template.")
SYSTEM = Flag("system", str, "System message ahead of the conversation.")

Stats = Literal["short", "full"]  # how much to print about an answer
STATS = Flag(
    "stats",
    Stats,
    "Print tokens, speed and drafts of the answer to standard error; =full: all figures.",
    metavar="[=full]",
)

KV_MEMORY = Flag(
    "kv_memory",
    str,
    "Memory for KV caches, such as 500MB or 2GB. Default: half of the free memory.",
    metavar="SIZE",
    rare=True,
)

_CONFIG = Flag("config", Path, "YAML file of options; flags override it.", metavar="FILE")
_flag_names: set[str] = set()  # names of all commands' flags: keys that the default file may hold


def with_flags(*flags: Flag) -> Callable[[Command], Command]:
    """Give a command `flags`, --config and --help-all; it receives them as the mapping `args`."""
    _flag_names.update(flag.name for flag in flags)

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        parameters = [entry for entry in signature.parameters.values() if entry.name != "args"]
        parameters += [flag.parameter() for flag in (*flags, _CONFIG)]
        parameters += [_keyword("help_all", default=False, annotation=_HELP_ALL)]

        @functools.wraps(command)
        def wrapper(config: Path | None, help_all: bool, **keywords: Any) -> None:  # noqa: ARG001  # handled by its callback
            values = {flag.name: keywords.pop(flag.name) for flag in flags}
            values = {name: value for name, value in values.items() if value not in (None, [])}
            args = merge_options(config, values, flags)
            args.update({"config": str(config)} if config else {})
            if args.get("output", "").startswith("~"):  # the shell has not expanded it
                args["output"] = str(files.local_path(args["output"]))
            command(**keywords, args=args)

        wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # typer reads the flags here
        return wrapper

    return decorate


class _Ranges(TypedDict, total=False):
    """Ranges of the flags that belong to no class of options."""

    workers: parts.Count
    concurrency: parts.Count
    max_tokens: parts.Count
    max_exit_layers: parts.Count
    max_copy_gb: Annotated[float, parts.at_least(0.0)]
    rungs: Annotated[int, parts.between(1, 7)]


def merge_options(file: Path | None, args: Args, flags: Sequence[Flag]) -> Given:
    """Merge options and type them: `args` over the YAML `file`, and both over the default file.

    Null in a file is a value. The default file may hold keys of other commands. Options with
    settings are merged setting by setting.
    """
    hints = {flag.name: flag.hint for flag in flags}
    defaults = _read_yaml(default_file(), _flag_names) if default_file().exists() else {}
    in_file = _read_yaml(file, hints) if file else {}
    options = Given()
    options.names = frozenset(in_file | args)
    for values in ({name: defaults[name] for name in hints if name in defaults}, in_file, args):
        typed_values = {name: parse(name, value, hints[name]) for name, value in values.items()}
        config.check({name: value for name, value in typed_values.items() if name in OPTION_NAMES})
        check_ranges(typed_values, _Ranges)
        for name in options.keys() & typed_values.keys():
            if dict in members(hints[name]):
                typed_values[name] = merge_values(name, options[name], typed_values[name])
        options.update(typed_values)
    return options


def default_file() -> Path:
    """The user's options for all commands: config.yaml in the system's folder for settings."""
    home = os.environ.get("XDG_CONFIG_HOME")
    folder = Path(home, "selfspec") if home else Path(typer.get_app_dir("selfspec"))
    return folder / "config.yaml"


def _read_yaml(file: Path, known: Iterable[str]) -> Args:
    """Read option names and values; dashes in names become underscores."""
    try:
        content = files.read_yaml(files.local_path(file)) or {}  # None: the file is empty
    except InvalidData as error:
        raise InvalidOption(f"cannot take the config: {error}") from error
    if not isinstance(content, dict):
        raise InvalidOption(f"{file} holds no `option: value` lines")
    values = {str(key).replace("-", "_"): value for key, value in content.items()}
    if len(values) < len(content):
        raise InvalidOption(f"{file} has a key twice, with a dash and with an underscore")
    check_keys(values, known, f"key in {file}:")
    return values


def pick(args: Mapping[str, Any], flags: Iterable[Flag]) -> Args:
    return {flag.name: args[flag.name] for flag in flags if flag.name in args}


def options_of(kind: type[Options], args: Args) -> Options:
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    return kind(**{name: value for name, value in args.items() if name in names})


def require(args: Args, *names: str) -> None:
    for name in names:
        if args.get(name) is None:
            flag = "--" + name.replace("_", "-")
            raise InvalidOption(f"no {flag}. Give the flag, or the key in a --config file")


def refuse(args: Given, names: Set[str], reason: str) -> None:
    """Raise InvalidOption if this command was given one of `names`, which it would ignore."""
    if ignored := args.names & names:
        raise InvalidOption(f"{min(ignored)} {reason}")


def inputs(args: Args) -> list[object]:
    """The values that may name files to read: all but the outputs."""
    return [value for name, value in args.items() if name not in ("output", "html", "card")]


def check_file(args: Args, name: str | Path) -> Path:
    return files.check_file(name, overwrite=args.get("overwrite", False), reads=inputs(args))


def kv_memory(args: Args) -> int | None:
    """The size of --kv-memory in bytes."""
    if (size := args.get("kv_memory")) is None:
        return None
    if match := re.fullmatch(r"(\d{1,15}(?:\.\d+)?) *([KMGT]?)(i?)B?", size, re.ASCII | re.I):
        unit = (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " ")
        if num_bytes := int(float(match[1]) * unit):
            return num_bytes
    raise InvalidOption(f"kv_memory is {size!r}, expected a size like 500MB or 2GB")


# --- help


class GroupedCommand(TyperCommand):
    """A command whose help lists options under the headings of their flags."""

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]  # typer's own context
        """List the options; with --help-all also rare options, and the settings of options."""
        everything = "help_all" in ctx.meta
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in map(copy.copy, self.get_params(ctx)):
            if everything:
                parameter.hidden = False  # type: ignore[attr-defined]  # options have it
            if record := parameter.get_help_record(ctx):
                default = "Arguments" if parameter.param_type_name == "argument" else "Options"
                heading = getattr(parameter, "rich_help_panel", None) or default
                sections.setdefault(heading, []).append(record)
        for name in [parameter.name for parameter in self.params if everything]:
            if name in PARTS:
                sections[f"Settings of --{name}"] = list(part_settings(PARTS[name]))
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


def _show_all(context: typer.Context, everything: bool) -> None:
    if everything:
        context.meta["help_all"] = True
        emit(context.get_help() + "\n")
        raise typer.Exit


_HELP_ALL = Annotated[
    bool, typer.Option("--help-all", help="Show all options.", is_eager=True, callback=_show_all)
]


def docstrings(options: type) -> dict[str, str]:
    """The first paragraph of each field's docstring, inherited fields too, on one line."""
    texts: dict[str, str] = {}
    for kind in filter(is_dataclass, reversed(options.__mro__)):
        definitions = {getattr(node, "name", ""): node for node in _parsed(kind.__module__).body}
        for pair in itertools.pairwise(definitions[kind.__name__].body):
            match pair:
                case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    texts[name] = " ".join(text.split("\n\n")[0].split())
    return texts


def _metavar(hint: Any, separator: str) -> str | None:
    """The placeholder for a value of this type: `N`, or `N[,N..]` for several."""
    tuples = [member for member in members(hint) if get_origin(member) is tuple]
    names: dict[Any, str] = {int: "N", float: "X", str: "TEXT", list[str]: "TEXT"}
    name = names.get(get_args(tuples[0])[0] if tuples else members(hint)[0])
    return f"{name}[{separator}{name}..]" if tuples else name


def part_settings(kinds: Kinds) -> Iterator[tuple[str, str]]:
    """Yield kinds, each followed by its settings, as pairs of a term and its meaning."""
    for kind, part in kinds.items():
        if kind:
            yield kind, " ".join((part.__doc__ or "").split())
        built_in, hints, texts = part(), annotations_of(part), docstrings(part)
        for field in fields(part):
            value = getattr(built_in, field.name)
            default = "" if value is None else f" Default: {as_word(value)}."
            term = f"{kind}:{field.name}" if kind else field.name
            yield f"{term}={_metavar(hints[field.name], '/')}", texts[field.name] + default


# --- flags of several commands, and how they load and call a speculator

_USUAL = {
    *("model", "heads", "speculate", "drafter", "max_new_tokens"),
    *("temperature", "seed", "stop_strings", "json_schema"),
}
"""Names of the flags below that --help lists."""

Executor = Literal["auto", "fused", "cuda-graph", "generic"]

LOADING = group_flags(
    "Model",
    _USUAL,
    Flag("model", str, "Hub id, folder or .gguf file. Default: the bundled model."),
    Flag("heads", str, "Exit heads: folder, known name, hub id, logit-lens or none."),
    Flag(
        "dtype",
        Literal["float32", "bfloat16", "float16", "float64"],
        "Default: bfloat16, or float32 on processors that are slow in bfloat16. Drafts in float16 "
        "need --pinned.",
    ),
    Flag("device", str, "cpu, cuda, cuda:1, or auto to spread the layers over all devices."),
    Flag("attn_implementation", Literal["sdpa", "eager"], "Default: sdpa where the model has it."),
    Flag(
        "chat_template",
        str,
        "For models without one: alpaca, chatml, llama-2, vicuna, zephyr or a Jinja file.",
    ),
    Flag("draft_model", str, "Smaller model with the same vocabulary, to draft with."),
    Flag("datastore", str, "Texts to draft from, made by selfspec datastore.", metavar="FILE"),
    Flag("executor", Executor, "fused is for CPUs, cuda-graph for GPUs. Default: auto."),
)

SPECULATION = group_flags("Drafts", _USUAL, *option_flags(SpeculationOptions, OPTION_NAMES))

GENERATION = group_flags(
    "Answer",
    _USUAL,
    Flag("max_new_tokens", int, f"Maximum new tokens. Default: {config.DEFAULT_MAX_NEW_TOKENS}."),
    Flag("min_new_tokens", int, "Minimum new tokens."),
    Flag("stop_strings", list[str], "Text that ends the answer; repeatable.", ("--stop",)),
    Flag("do_sample", bool, "Sample; implied by the next four flags."),
    Flag("temperature", float, "Divides the logits; 0 is greedy."),
    Flag("top_k", int, "Sample from the N likeliest tokens; 0: all. Default: the model's, or 50."),
    Flag("top_p", float, "Sample from the likeliest tokens of this total probability, in (0, 1]."),
    Flag("min_p", float, "Leave out tokens less likely than this times the likeliest one."),
    Flag("repetition_penalty", float, "Above 1: lowers scores of tokens in the text so far."),
    Flag("presence_penalty", float, "Lowers scores of tokens that are in the answer."),
    Flag("frequency_penalty", float, "Lowers scores of tokens by their count in the answer."),
    Flag("json_schema", str, "Write JSON that follows the schema in this file.", metavar="FILE"),
    Flag("grammar", str, "Write text that follows the Lark grammar in this file.", metavar="FILE"),
    Flag("seed", int, "Makes sampling repeatable."),
    Flag(
        "chat_template_kwargs",
        str | dict,
        'Variables of the chat template: {"enable_thinking": false}.',
        metavar="JSON",
    ),
)

SHARED = (*LOADING, *SPECULATION, *GENERATION)

_NO_FOLDER = hub.LOGIT_LENS, hub.NO_HEADS


def answer_options(args: Args) -> Args:
    """Keywords of `Speculator.generate`, checked; names of files become their contents."""
    options = pick(args, GENERATION)
    check_ranges(options, config.GenerateOptions)
    for name, read in (("json_schema", files.read_json), ("grammar", files.read_text)):
        if name in options:
            file, options[name] = options[name], read(files.local_path(options[name]))
            if options[name] is None:
                raise InvalidOption(f"{file} holds null, expected a schema")
    if (grammar := config.grammar_of(options)) is not None:
        config.check_grammar(grammar)
    if isinstance(text := options.get(name := "chat_template_kwargs"), str):
        options[name] = files.parse_json(text, name)
    if not isinstance(options.get(name, {}), dict):
        raise InvalidOption(f'{name} is {text}, expected names and values: {{"thinking": false}}')
    return options


def load(args: Args, *, runs_model: bool = False) -> Speculator:
    """Load the speculator that the flags ask for; this is where torch is imported.

    A terminal shows a status line while this runs. `runs_model`: the model's own modules will run,
    too, so that weights which its file holds as blocks are expanded and kept.
    """
    check_model(args)
    from rich.console import Console
    from rich.live import Live

    title = f"loading {args.get('model', 'the default model')}: "
    with Live(
        f"{title}importing torch and transformers",
        console=Console(stderr=True, quiet=is_quiet(), markup=False, highlight=False, emoji=False),
        refresh_per_second=1,
        transient=True,
        redirect_stdout=False,  # downloads have bars of their own
        redirect_stderr=False,
    ) as status:
        from selfspec.api import speculator
        from selfspec.model.weights import keep_numbers

        status.update(f"{title}reading and checking it")
        loaded = speculator.load(**pick(args, LOADING), **pick(args, SPECULATION))
        if runs_model:
            keep_numbers(loaded.model)
    if interrupts:  # a library swallowed Ctrl-C while it was imported
        raise KeyboardInterrupt
    return loaded


def check_template(args: Given, command: str = "generate") -> None:
    """Refuse messages without a chat template, or --raw with one, before anything is loaded."""
    raw, name, heads = args.get("raw"), args.get("model"), args.get("heads")
    if raw:
        refuse(args, {"system", "chat_template"}, "and --raw at once. Leave one of them out")
    elif "chat_template" in args:
        read_template(args["chat_template"])
    if raw or name is None or "chat_template" in args or hub.has_template(name):
        return
    folders = [*hub.list_heads(), *known_folders()]
    if heads:
        folders = [] if heads in _NO_FOLDER else [hub.resolve_heads(heads)]
    errors = [] if heads else [SelfspecError]  # skip damaged folders that the user did not name
    for folder in folders:
        with contextlib.suppress(*errors):
            if read_config(folder).get("chat_template"):
                return
    arguments = sys.argv[1:] if command in sys.argv else [command, "--model", name]
    arguments.insert(arguments.index(command) + 1, "--raw")
    raw_command = shlex.join(["selfspec", *arguments])
    problem = f"{name} has no chat template: is it a base model? {advice(name)}"
    raise InvalidPrompt(f"{problem}; or continue a text: {raw_command}")


def check_model(args: Args) -> None:
    """Refuse, before torch is imported, options that could never be loaded."""
    if "device" in args and not re.fullmatch(r"[a-z]+(:[0-9]+)?", args["device"]):
        raise InvalidOption(f"device is {args['device']!r}, expected cpu, cuda, cuda:0 or auto")
    options = SpeculationOptions().updated(pick(args, SPECULATION))
    needs = {
        "draft-model": "draft_model" not in args and "a second model. Give --draft-model",
        "rest": "datastore" not in args and "a datastore. Give --datastore",
        "exit": args.get("heads") == hub.NO_HEADS and "heads. Leave --heads none out",
    }
    for part, need in needs.items():
        if need and "drafter" in args and options.speculate and options.uses(part):
            raise InvalidOption(f"drafter {options.drafter} needs {need}")
    if "datastore" in args:
        files.check_safetensors(files.local_path(args["datastore"]))
    models = args.keys() & {"model", "draft_model"}
    for name in models:
        if not args[name]:
            raise InvalidOption(f"{name} is empty, expected a hub id, a folder or a .gguf file")
        hub.require_model(args[name])
    heads = args.get("heads", hub.NO_HEADS if models else hub.DEFAULT_HEADS)
    if heads not in _NO_FOLDER and args.keys() & {"heads", "drafter"}:
        fitted = read_config(hub.resolve_heads(heads))["exit_layers"]
        for layer in options.exit.layers or ():
            if layer not in fitted:
                choices = ", ".join(map(str, fitted))
                raise InvalidOption(f"exit layer {layer} is not among those of {heads}: {choices}")


# --- prompts

MOST_PROMPT_BYTES = 4 << 20  # about a million tokens, more than any model takes


def read_prompt(prompt: str | None, file: str | None = None, *, raw: bool = False) -> str:
    """Read the prompt from one of the argument, the file and standard input.

    A newline at the end of a file or of standard input is dropped unless `raw`.
    """
    if prompt is not None and file is not None:
        raise InvalidPrompt("a prompt and --file at once, expected one. Leave one of them out")
    if prompt is None and file is None and sys.stdin.isatty():
        raise InvalidPrompt("no prompt. Give one as an argument, with --file, or through a pipe")
    try:
        if prompt is not None:
            data = prompt.encode("utf-8", "surrogateescape")  # as the shell gave it
        elif file is not None:
            data = files.read_bytes(files.local_path(file), MOST_PROMPT_BYTES)
        else:
            data = sys.stdin.buffer.read(MOST_PROMPT_BYTES + 1)
        if len(data) > MOST_PROMPT_BYTES:
            raise InvalidPrompt(f"the prompt has more than {MOST_PROMPT_BYTES} bytes")
        text = data.decode("utf-8-sig")
    except (OSError, InvalidData) as error:
        raise InvalidPrompt(f"cannot read the prompt: {error}") from error
    except UnicodeDecodeError as error:
        raise InvalidPrompt(f"the prompt is not UTF-8: byte {error.start} is wrong") from error
    if not text.strip():
        raise InvalidPrompt("the prompt is empty. Give some text")
    return text if raw or prompt is not None else text.rstrip("\r\n")


def conversation(system: str | None, *turns: str) -> list[dict[str, str]]:
    """Messages: the system's, if given, then the user's."""
    opening = [] if system is None else [{"role": "system", "content": system}]
    return [*opening, *({"role": "user", "content": turn} for turn in turns)]


# --- output


def emit(text: str) -> None:
    """Write results and flush them. Raises OSError on failure, which `main` explains."""
    sys.stdout.write(text)
    sys.stdout.flush()


def emit_json(value: Any) -> None:
    emit(json.dumps(value) + "\n")


def emit_facts(facts: Mapping[str, Any]) -> None:
    width = max(map(len, facts))
    emit("".join(f"{name:<{width}}  {words(value)}\n" for name, value in facts.items()))


def words(value: Any) -> str:
    """A value on one line; lists without brackets."""
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)


def to_stderr(text: str) -> None:
    """Write a line that is not a result to standard error."""
    typer.echo(text, err=True)


def note(text: str) -> None:
    """Write a notice to standard error, except with --quiet."""
    if not is_quiet():
        to_stderr(text)


def is_quiet() -> bool:
    return logging.getLogger("selfspec").level == logging.ERROR


def complain(error: SelfspecError | str) -> None:
    """Write an error on one line, without characters that would move a terminal's cursor."""
    line = " ".join(str(SelfspecError(str(error))).split())  # SelfspecError bounds the length
    to_stderr("selfspec: error: " + "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line))


def error_message(error: Exception) -> str | None:
    """The message of an error raised on purpose, by the system or for memory; None for others."""
    if isinstance(error, SelfspecError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        if error.filename:
            return f"cannot use {error.filename}: {error.strerror}"
        return f"cannot write standard output or a file: {error.strerror}"
    text = str(error)
    match = re.search("out of memory|allocate memory|failed to map segment", text)
    if isinstance(error, MemoryError) or match:
        return f"there is not enough memory: {first_line(error)}. Ask for less, or free some"
    return None


def report_bug(error: Exception, arguments: Sequence[str], trace: str) -> str:
    """Write the command and the traceback to a file; return the line that reports the bug."""
    message = f"this is a bug in selfspec: {type(error).__name__}: {first_line(error)}"
    command = f"selfspec {metadata.version('selfspec')}: {shlex.join(arguments)}"
    try:
        path = files.cache_folder() / "bugs" / f"{time.time_ns()}.txt"
        files.write(path, f"{command}\n\n{trace}".encode("utf-8", "backslashreplace"))
    except (SelfspecError, OSError) as problem:
        return f"{message}. No report could be written ({problem}). To see more, add --debug"
    return f"{message}. A report is in {path}: please send it with what `selfspec env` says"


def statistics(answer: Generation, kind: Stats) -> str:
    if kind == "short":
        return answer.summary()
    from selfspec.model.weights import TEAM

    busy = ", as other programs keep this machine busy" if TEAM.crowded else ""
    return f"{answer.stats.line()}; {counted(TEAM.threads, 'thread')}{busy}"


def say_if_cut(answer: Generation, options: Mapping[str, Any]) -> None:
    """Log that an answer was cut by the default limit, which the user did not set."""
    if answer.stop_reason == "length" and "max_new_tokens" not in options:
        message = "the answer was cut after %s; more: --max-new-tokens"
        logger.info(message, counted(len(answer.token_ids), "token"))


def is_first() -> bool:
    """Whether this process is the only one, or the one of several that prints and writes."""
    return os.environ.get("RANK", "0") == "0"


def say_next(command: str, args: Args, *words: str) -> None:
    """Print the next command to run with the same model, ready to paste.

    Only a chat template that was given as text must become a file; heads bring it themselves.
    """
    if is_first():
        flags = {"model": "--model", "dtype": "--dtype", "chat_template": "--chat-template"}
        values = {name: str(args[name]) for name in flags if name in args}
        is_text, hint = "{" in values.get("chat_template", ""), ""
        if is_text and "--heads" in words:
            del values["chat_template"]
        elif is_text:
            values["chat_template"], hint = "FILE.jinja", " (FILE.jinja: the chat template in use)"
        pairs = [(flags[name], value) for name, value in values.items()]
        note(f"next: {shlex.join(['selfspec', command, *words, *itertools.chain(*pairs)])}{hint}")


def raw_flag(tokenizer: object) -> list[str]:
    """The flag that commands need for a model without a chat template."""
    return ["--raw"] if getattr(tokenizer, "chat_template", None) is None else []


def table_text(grid: Table) -> str:
    """A table as text; wrapped only if standard output is a terminal."""
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 1000)
    with console.capture() as capture:
        console.print(grid)
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


LOGGED_S = 60.0  # between two lines of progress in a log


@contextlib.contextmanager
def bar(name: str, unit: str, *, rate: bool = False) -> Iterator[Callable[..., None]]:
    """Show a progress bar on standard error, with the time left; with `rate` also units/s.

    Yields `show(done, total, words="", found=False)`. `total` None: unknown. `found`: earlier runs
    did this much, so it does not count for the time left. In a log or on a dumb terminal, where no
    bar can move, it prints one line at once, and then one line per minute.
    """
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn(name),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn(unit + "  {task.fields[words]}"),
        progress.TimeRemainingColumn(),
    )
    console, disable = Console(stderr=True), is_quiet() or not is_first()
    logged_at = -LOGGED_S
    with progress.Progress(*columns, console=console, disable=disable) as display:
        task = display.add_task(name, total=None, words="")

        def show(done: int, total: int | None, words: str = "", *, found: bool = False) -> None:
            nonlocal logged_at
            change = display.reset if found else display.update  # a reset restarts the clock
            change(task, completed=done, total=total, words=words)
            if rate and (speed := display.tasks[0].speed):
                display.update(task, words=f"{speed:,.0f} {unit}/s")
            can_move = console.is_terminal and not console.is_dumb_terminal
            if not can_move and not disable and time.monotonic() >= logged_at + LOGGED_S:
                logged_at = time.monotonic()
                console.print(display.get_renderable())

        yield show


# --- streams, which may be closed, full, or without a reader


def repair_streams() -> None:
    """Reopen closed streams, escape characters that they cannot encode, and give them a width."""
    os.environ["COLUMNS"] = os.environ.get("COLUMNS", "").lstrip("0")  # rich prints nothing at 0
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # else the next opened file would get this number and the stream's text
            os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY)
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    # a stdout that was closed is read-only now: the first write to it raises an error
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    buffer = io.BufferedWriter(_Forgiving(2, "wb", closefd=False))
    sys.stderr = io.TextIOWrapper(buffer, errors="backslashreplace", line_buffering=True)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


class _Forgiving(io.FileIO):
    """A file that drops bytes which cannot be written, instead of raising an error."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or len(data)
        except OSError:
            return len(data)
