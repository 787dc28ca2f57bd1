"""Command lines that cannot be carried out give one line of error and exit code 2.

The error comes within half a minute, for wrong arguments before a model is loaded. No file is
changed, removed or half-written. `tests/test_damage.py` puts values of wrong types anywhere in a
file; the values here have a meaning.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from selfspec import files
from selfspec.cli.main import main
from selfspec.hub import models as hub
from selfspec.serve.options import VARIABLE
from tests.api.test_bad_input import bert
from tests.bad_input import Change, config, patience, snapshot, tensors
from tests.cli.fakes import Call
from tests.gguf_models import header, tensor, text, tiny, value
from tests.talks import dialogue
from tests.traces import long_trace

SHORT = {
    "M": "--model model --dtype float32",
    "L": "--model model --dtype float32 --heads logit-lens",
    "H": "--model model --dtype float32 --heads heads",
    "P": "--suite prompts.jsonl --output new",
    "D": "--output new.jsonl --max-new-tokens 20",
    "T": "--data talks.jsonl --output new --batch-tokens 64",
}
"""Abbreviations in the lines below."""


@pytest.fixture(scope="module")
def furnished(tmp_path_factory: pytest.TempPathFactory, made: Path) -> Path:
    """A folder with conversations, heads, a feature cache, and damaged or foreign look-alikes."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("model", "heads"):
        shutil.copytree(made / name, folder / name)
    long_trace(["t0 ", "t1 ", "t2 "]).save(folder / "trace.jsonl")
    (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    (folder / "text.txt").write_text("a stranger's words\n")
    (folder / "garbage").write_bytes(bytes(range(256)) * 9)
    (folder / "empty").touch()
    (folder / "dir").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to("text.txt")
    (folder / "dangling").symlink_to("nobody")
    shutil.copy(made / "talks.jsonl", folder)
    (folder / "bad.jsonl").write_text(json.dumps({"messages": dialogue("a", "a")}) + "\n[\n")
    (folder / "read.jsonl").write_text('{"input_ids": [1, 2], "answers": []}\n')
    (folder / "half").mkdir()
    (folder / "half" / "manifest.json").write_text('{"format_version": 3}')
    (folder / "half" / "calibration.json").touch()
    (folder / "shards").mkdir()
    (folder / "shards" / "shard-00000.safetensors").touch()
    (folder / "schema.json").write_text("7")
    (folder / "null.json").write_text("null")
    (folder / "talks.gguf").write_text("no model")
    (folder / "stub.gguf").write_text("GGUF")
    for name in ("garbage.jsonl", "link.html", "dangling.png", "pipe.html"):
        (folder / name).symlink_to(name.partition(".")[0])
    untaught = shutil.copytree(folder / "model", folder / "untaught")
    (untaught / "chat_template.jinja").unlink()
    (folder / "device").symlink_to("/dev/full")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        line = "cache M T --output features --exit-layers 2,4 --top-k 1"
        assert main(words_of(line)) == 0
    return folder


def words_of(line: str) -> list[str]:
    return shlex.split(" ".join(SHORT.get(word, word) for word in line.split(" ")))


Refused = Callable[..., str]


@pytest.fixture
def refused(furnished: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> Refused:
    """Run a command in this folder; the one line of its error, which must hold `words`."""
    monkeypatch.chdir(furnished)

    def refuse(line: str | list[str], words: str = "", given: bytes | None = b"") -> str:
        before = snapshot(Path.cwd())
        with patience():
            error = call(words_of(line) if isinstance(line, str) else line, 2, given=given).err
        lines = [line for line in error.splitlines() if "selfspec: error: " in line]
        assert len(lines) == 1, error[-2000:]
        assert "Traceback" not in error
        assert len(lines[0]) > len("selfspec: error: ") + 10
        assert words in lines[0], lines[0]
        assert snapshot(Path.cwd()) == before
        return str(lines[0])

    return refuse


EARLY = """
generate                                         | the prompt is empty
generate say hi                                  | argument(s) (hi). Put a prompt of several words
generate a --file text.txt                       | a prompt and --file at once
generate --file nowhere                          | cannot read the prompt
generate --file garbage                          | the prompt is not UTF-8: byte 128
generate a --raw --system s                      | system and --raw at once
trace a --raw --chat-template chatml             | chat_template and --raw at once
generate a --max-new-tokens                      | requires an argument
generate a --drafter exit:layers=7               | exit layer 7 is not among those of smollm2
generate a --hedas x                             | --heads
generate a --dtype float31                       | 'float31' is not one of 'float32'
generate a --device 0                            | device is '0', expected cpu
generate a --heads nowhere                       | 'nowhere' is neither a folder nor a known name
generate a --heads ''                            | heads is empty. Known
generate a --model nowhere.gguf                  | 'nowhere.gguf' is not there
generate a --drafter ngram+draft-model           | needs a second model
generate a --drafter ngram+rest                  | needs a datastore
generate a --kv-memory 1GB                       | kv_memory is for --prompts
generate a --drafter exit --heads none             | drafter exit needs heads
generate --prompts prompts.jsonl --output new --model untaught --heads none | is it a base model?
generate a --model talks.gguf                    | talks.gguf is no GGUF file
adapt --output new --seed 9223372036854775809    | seed is 9223372036854775809, expected a value
adapt --model model --output new --questions empty | empty holds no questions
adapt --model model --raw --output=              | the name of a file is empty
adapt --output new --budget 5x                   | budget is 5x, expected 10s or more
data --model untaught --tokens 9 --output x      | a text: selfspec data --raw --model untaught
generate --prompts prompts.jsonl                 | --prompts and --output go together
generate a --prompts prompts.jsonl --output new  | --prompts and another prompt at once
generate --prompts empty --output new            | empty holds no prompts
generate --prompts prompts.jsonl --output new --json | each line of --output has both
generate --prompts prompts.jsonl --output new --concurrency 0 | concurrency is 0, expected a value
generate --prompts prompts.jsonl --output new --kv-memory 0 | '0', expected a size like 500MB or 2GB
generate a --json-schema schema.json             | is 7
generate a --json-schema null.json               | null.json holds null, expected a schema
generate a --chat-template-kwargs [1]            | chat_template_kwargs is [1], expected names and
chat --chat-template-kwargs x                    | chat_template_kwargs is not JSON
generte a                                        | Did you mean 'generate'?
nothing                                          | 'nothing'. Known: generate, chat, demo
generate a --frobnicate                          | For all of them: selfspec generate --help-all
heads show                                       | Missing argument 'DIR'
heads list -q -v                                 | --quiet and --verbose at once
chat --chat-template none.jinja                  | cannot read none.jinja
chat --chat-template vicunna                     | Did you mean vicuna?
chat --chat-template text.txt                    | text.txt is no chat template: it does not show
env --model nowhere                              | nowhere
report dir                                       | Missing option '--output'
report dir --output new                          | holds no finished run
trace a --html page                              | expected a name that ends in .html
trace a --card card.jpg                          | card.jpg: expected a name that ends in .png
trace a --output new.html --html new.html        | new.html is named for two outputs
trace a --from trace.jsonl                       | a prompt and --from at once
trace --from trace.jsonl --output new            | output means nothing with --from
tune --suite prompts.jsonl --limit 1             | one question cannot be held
tune --suite spec-bench                          | Give --questions FILE
tune --suite spec-bench --questions ''           | the name of a file is empty
tune --suite sixtasks                            | Did you mean six-tasks?
tune --forget --json                             | --forget removes files, without
tune --max-new-tokens 1                          | max_new_tokens is 1, expected at least 2
tune --objective fast                            | 'fast' is not one of 'speed', 'latency'
bench                                            | no --output
bench P --methods plain,specualtion              | Did you mean speculation?
bench P --sweep exit.threshold=x                 | expected
bench P --sweep exit_threshold=1                 | Did you mean exit.threshold?
bench P --seed 99999999999999999999            | seed is 99999999999999999999, expected a value in
bench P --questions text.txt                     | prompts.jsonl and --questions at once
bench P --concurrency 1,9                        | 9 texts at once, of 2 questions. Give a larger
bench P --concurrency 1 --output ''              | the name of a file is empty
bench P --concurrency 1 --sweep exit.threshold=0.5 | sweep means nothing with --concurrency
verify --max-copy-gb -1                          | max_copy_gb is -1.0, expected a value of
verify --rungs 2,8                               | rungs is 8, expected a value in [1, 7]
verify --rungs two                               | rungs is 'two', expected a list of whole
verify --suite six-tasks --questions prompts.jsonl | Leave one out
serve --host 0.0.0.0                             | which others can reach. Set SELFSPEC_API_KEY
serve --cors-origin https://a.b --cors-origin *  | every web page that
serve --cors-origin page.example                 | expected scheme and host
serve --cors-origin https://page.example/        | expected scheme and host
serve --port 70000                               | port is 70000, expected a value
serve --kv-memory much                           | expected a size like 500MB or 2GB
serve --api-key-file nowhere                     | cannot read nowhere
serve --api-key-file empty                       | empty holds no API key
serve --api-key-file text.txt                    | characters that no header can carry
fit --data talks.jsonl                           | no --output
fit T --cache features                           | batch_tokens with cache: that holds
fit --data talks.jsonl --cache features --output new | data with cache: that holds
fit T --head-type linear --draft-steps 3         | draft_steps means nothing to linear heads
fit T --head-type linear --state-layers 1,2      | state_layers means nothing to linear heads
fit T --preset specbond                          | Did you mean specbound?
fit T --seed 9223372036854775809                 | seed is 9223372036854775809, expected a value
fit T --validation ''                            | the name of a file is empty
fit --cache nowhere --output new                 | nowhere is no feature cache
fit --data talks.jsonl --output half --overwrite | calibration.json, which selfspec did not write
fit --data talks.jsonl --output heads            | already. Give --overwrite
cache --data talks.jsonl --output half           | which selfspec did not write
cache --data talks.jsonl --output shards         | which selfspec did not write
cache --data talks.jsonl --output memory://x     | memory:// ends with this command
calibrate M --data talks.jsonl                   | no --heads
calibrate H --cache features --max-exit-layers 0 | max_exit_layers is 0, expected a value
calibrate H --data talks.jsonl --cache features  | data with cache: that holds
calibrate H --entropy --data talks.jsonl --cache features | cache means nothing with --entropy
calibrate M --entropy --data talks.jsonl --max-exit-layers 1 | means nothing with --entropy
data --tokens 5                                  | no --output
data --output new.jsonl                          | no --tokens
data --output new.jsonl --tokens 9 --workers 0   | workers is 0, expected a value of at least 1
data --output new.jsonl --tokens 9 --workers 2 --endpoint U | workers with endpoint
data --output new.jsonl --tokens 9 --recipe none | cannot read none
data --output new.jsonl --tokens 9 --passages no | no is no folder
data --output new.jsonl --recipe a --from talks.jsonl | recipe with --from
data --tokens 9 --output prompts.jsonl           | no prompts.jsonl.run.json to continue it by
data --tokens 9 --output link                    | is a link
data --tokens 9 --output new.txt                 | would hold lines of JSON. Name it new.jsonl
"""
"""Command lines and words of their error. No model is loaded."""

LATE = """
trace a L --drafter exit:layers=2/9              | exit layer 9 is not among
bench L P --sweep exit.max_depth=3 --drafter exit:layers=2/4 | exit:max_depth 3 is not among
env --model model --dtype float64 --executor fused | fused executor
cache M T --max-size 0.00001                     | more than max_size 1e-05
cache M T --no-deep --exit-layers 0,2            | exit layer 0 is not among
fit M --cache half --output new                  | half is no feature cache
fit M T --batch-tokens 8                         | at most 8 fit into a batch
fit M --cache features --output new --ce-share 0 | the cache holds the likeliest token alone
cache M --data read.jsonl --output new --answers-only | the text holds no answers to keep
calibrate H --cache features                     | not [5]
datastore --model model --texts '' --output new  | the name of a file is empty
data M D --tokens 9 --questions none.jsonl       | none.jsonl
data M D --from bad.jsonl                        | bad.jsonl, line 2 is not JSON
generate a --model stub.gguf --raw               | cannot load stub.gguf: it is no GGUF file: it has
generate a L --device meta                       | device is meta, where nothing is computed
"""
"""Errors that need the model. For values out of range, see tests/api/test_bad_input.py."""


MISSING = """
data D --tokens 9 --endpoint U        | --endpoint needs httpx: pip install 'selfspec[train]'
bench P                               | bench needs pandas: pip install 'selfspec[eval]'
trace --from trace.jsonl --card a.png | --card needs matplotlib: pip install 'selfspec[eval]'
serve --port 0 --replicas 2           | more than one copy needs ray: pip install 'selfspec[ray]'
"""


def cases(lines: str) -> list[tuple[str, str]]:
    rows = [line.rpartition("|") for line in lines.strip().splitlines()]
    return [(line.rstrip(), words.strip()) for line, _, words in rows]


@pytest.mark.usefixtures("empty_cache")  # heads pulled by other tests may bring a template
@pytest.mark.parametrize(("line", "words"), cases(EARLY))
def test_wrong_arguments_are_refused_before_anything_is_loaded(
    line: str, words: str, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "load_model", lambda *_, **__: pytest.fail("loaded a model"))
    monkeypatch.delenv(VARIABLE, raising=False)
    refused(line, words)


@pytest.mark.parametrize(("line", "words"), cases(LATE))
def test_arguments_against_the_model_are_refused(line: str, words: str, refused: Refused) -> None:
    refused(line, words)


def test_a_missing_package_is_named_with_its_extra(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("httpx", "pandas", "matplotlib", "ray"):
        monkeypatch.setitem(sys.modules, name, None)
    for line, words in cases(MISSING):
        refused(line, words)


def test_missing_or_non_utf_8_prompts(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(["generate", "\udcff"], "the prompt is not UTF-8")
    refused("data --tokens 9 --output new.jsonl --system \udcff", "is '\\udcff', half a character")
    refused("generate", "byte 0 is wrong", b"\xff")
    refused(
        "generate", "the prompt has more than 4194304 bytes", b"a" * 4194304 + "\u00e9".encode()
    )
    for turns in (b"\xff\n", b"a\n\xc3\n"):
        refused("chat M --max-new-tokens 2", given=turns)
    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    refused("generate", "no prompt", None)


def test_single_process_commands_are_refused_under_a_launcher(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    of_heads = "calibrate --heads heads --cache features"
    for line in ("adapt --output new", of_heads, "data D --tokens 9"):
        refused(f"{line} --model model", "a launcher started several processes")


YAML = [
    ("max_new_tokens: 3\nmax-new-tokens: 4\n", "has a key twice"),
    ("max_new_token: 3\n", "Did you mean max_new_tokens?"),
    ("- epochs\n", "holds no `option: value` lines"),
    ("pinned: 1\n", "pinned is 1, expected True or False"),
    ("temperature: .nan\n", "temperature is nan, expected a finite number"),
    ('model: "a\\0b"\n', ""),
]


@pytest.mark.parametrize(("text", "words"), YAML)
def test_a_wrong_config_is_refused(text: str, words: str, tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "config.yaml").write_text(text)
    line = f"generate a {'--heads logit-lens' if 'model' in text else 'L'} --config"
    refused(f"{line} {tmp_path}/config.yaml", words)


# --- names of missing or unsuitable files

READERS = """
generate a M --config @
generate a M --json-schema @
generate a M --grammar @
generate a --model @
generate a M --draft-model @
generate a M --datastore @
datastore --model model --output new.safetensors --data @.jsonl
datastore --model model --output new.safetensors --texts @
generate a M --heads @
trace --from @
tune L --suite @.jsonl
tune L --suite spec-bench --questions @
report @ --output new
heads show @
heads pull @
heads check @ --model model
fit M --output new --data @.jsonl
fit M --output new --data prompts.jsonl --validation @.jsonl
fit M --output new --cache @
calibrate M --data prompts.jsonl --heads @
data M --output new.jsonl --tokens 9 --recipe @
data M D --from @.jsonl
serve --api-key-file @
generate --file @
generate --prompts @ --output new
"""
"""A line for each way to read a file. For more unsuitable files, see tests/test_files.py."""

NO_FILES = ("nowhere/at/all", "garbage", "/dev/zero")


@pytest.mark.parametrize(
    ("reader", "name"), [*zip(READERS.strip().splitlines(), itertools.cycle(NO_FILES))]
)
def test_missing_or_unsuitable_inputs_are_refused(reader: str, name: str, refused: Refused) -> None:
    refused(reader.replace("@", name), name)


@pytest.mark.parametrize("reader", READERS.strip().splitlines())
def test_a_tilde_is_the_home_folder(
    reader: str, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("it", "it.jsonl"):
        shutil.copy("garbage", tmp_path / name)
    assert "No such file" not in refused(reader.replace("@", "~/it"))


WRITERS = """
trace --model missing a --output text.txt
trace --model missing a --html link.html
trace --model missing a --card dangling.png
trace --from trace.jsonl --html pipe.html
generate --model missing --prompts prompts.jsonl --output device
bench --model missing --suite prompts.jsonl --output text.txt/below
report missing --output hidden/nowhere\0
"""
"""A line for each kind of obstacle. For the words of each error, see tests/test_files.py."""


@pytest.mark.parametrize("writer", WRITERS.strip().splitlines())
def test_files_in_the_way_of_an_output_stay(writer: str, refused: Refused) -> None:
    error = refused(f"{writer} --overwrite")
    assert "missing" not in error  # refused before the model or run is looked up


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("fit T", "new"),
        ("cache --data talks.jsonl --output new", "new"),
        ("data --tokens 9 --output new.jsonl", "new.jsonl"),
    ],
)
def test_an_output_locked_elsewhere_is_refused(line: str, name: str, refused: Refused) -> None:
    with files.locked(Path(name).absolute()):
        refused(line, "is being written by another process")


# --- models


WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"


def in_parts(called: Callable[[str], str]) -> Change:
    """Move the weights to another file, under the name that `called` gives it in the index."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).rename(folder / "part.safetensors")
        name = called("part.safetensors")
        index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(tensors, name)}
        (folder / INDEX).write_text(json.dumps(index))

    return damage


def replaced(name: str, make: Callable[[Path], object]) -> Change:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return damage


def make_loop(path: Path) -> None:
    path.symlink_to(f"{path.name}.link")
    path.with_name(f"{path.name}.link").symlink_to(path.name)


MODELS: dict[str, Change] = {
    "`nobody`": config(model_type="nobody"),
    "custom code": config(model_type="mine", auto_map={"AutoConfig": "mine.Config"}),
    "BertLMHeadModel has no list of layers": lambda folder: bert().save_pretrained(folder),
    "its weights have other shapes than its config says": config(vocab_size=50),
    "none of its weights has hidden_size 48": config(hidden_size=48),
    "cannot load it: ": config(num_attention_heads=5, head_dim=None),
    "'mine'": config(rope_parameters={"rope_type": "mine", "rope_theta": 1.0}),
    "it lacks 1 weights": tensors(lambda t: t.pop("model.layers.3.mlp.up_proj.weight")),
    "its weights have other shapes": tensors(lambda t: t.update({NORM: torch.zeros(31)})),
    "norm.weight holds I32, expected F32": tensors(lambda t: t.update({NORM: t[NORM].int()})),
    "its config has hidden_size 32, which its weights have not": replaced(
        WEIGHTS, lambda path: save_file({"a": torch.zeros(2)}, path, {"format": "pt"})
    ),
    f"{WEIGHTS} is a folder": replaced(WEIGHTS, Path.mkdir),
    f"{WEIGHTS}: Too many levels of symbolic links": replaced(WEIGHTS, make_loop),
    f"{INDEX} is no file": replaced(INDEX, make_loop),
    "no config.json": replaced("config.json", make_loop),
    "tokenizer.json is no file": replaced("tokenizer.json", os.mkfifo),
    "vocab.json is no file": replaced("vocab.json", os.mkfifo),
    f"{INDEX} names '/": in_parts(lambda name: str(Path("it", name).absolute())),
    f"{INDEX} names '../it/part": in_parts(lambda name: f"../it/{name}"),
    f"{INDEX} names 'config.json', which is no .safetensors": in_parts(lambda name: "config.json"),
    "names 'mine', which": config(quantization_config={"quant_method": "mine", "bits": 4}),
    'into config.json, as "quantization_config"': lambda folder: (
        (folder / "quantize_config.json").write_text("{}"),
        tensors(lambda t: t.update({NORM: t[NORM].int()}))(folder),
    ),
    "are quantised, and none": config(quantization_config={"quant_method": "gptq", "bits": 4}),
    "data did not match any variant": lambda folder: (path := folder / "tokenizer.json").write_text(
        path.read_text().replace('"WordLevel"', '"Mine"')
    ),
}
"""The damage, by words of the error that it causes."""


@pytest.mark.parametrize("words", MODELS)
def test_a_model_that_cannot_be_run_is_refused(
    words: str, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree("model", tmp_path / "it")
    monkeypatch.chdir(tmp_path)
    MODELS[words](tmp_path / "it")
    refused("generate a --model it --dtype float32 --max-new-tokens 2", words)


NESTED = struct.pack("<IQ", 9, 1) * 50 + struct.pack("<IQ", 4, 0)

GGUF = {
    "it does not begin with GGUF": b"GGML" + bytes(60),
    "it says that 200 bytes follow": header(text(b"a", 200), bytes(9), values=1),
    "'utf-8' codec can't decode": header(value(b"\xff\xfe", 4, bytes(4)), values=1),
    "it names 'a' twice": header(value("a", 4, bytes(4)) * 2, values=2),
    f"{2**62} bytes follow": header(value("a", 9, struct.pack("<IQ", 4, 2**60)), values=1),
    "arrays that are nested too deeply": header(value("a", 9, NESTED), values=1),
    "its alignment is 32, expected": header(value("general.alignment", 8, text("32")), values=1),
    "its tensors end at byte 426 of 425": tiny()[:-1],
    "end at byte 53169": tiny().replace(tensor("t", [2, 2]), tensor("t", [2**60, 2**60])),
    "it names 't' twice": header(tensor("t", [1]) * 2, bytes(64), tensors=2),
    "the tensor t has a row": header(tensor("t", [33], kind=2), bytes(640), tensors=1),
    "it holds no tensors": header(),
    "one of 3 files. Join": header(value("split.count", 2, struct.pack("<H", 3)), values=1),
    "it does not say block_count and": header(tensor("t", [1]), bytes(64), tensors=1),
    "its 2 tensors are not 3 layers": tiny(layers=3),
    "not 2 layers of width 31": tiny(width=31),
    "too small for a feed_forward_length of 1048576": tiny(inner=1 << 20),
    "cannot read it.gguf as GGUF: GGUF metadata holds an array of type 9": tiny(),
    "with architecture mine is not supported yet": header(
        value("general.architecture", 8, text("mine")),
        value("mine.block_count", 4, struct.pack("<I", 1)),
        value("mine.embedding_length", 4, struct.pack("<I", 1)),
        tensor("t", [1]) + bytes(64),
        **{"values": 3, "tensors": 1},
    ),
}
"""The damage, by words of the error that it causes."""


@pytest.mark.parametrize("words", GGUF)
def test_a_gguf_file_that_holds_no_model_is_refused(
    words: str, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "it.gguf").write_bytes(GGUF[words])
    refused("generate --raw a --model it.gguf", words)
