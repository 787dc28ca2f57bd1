"""The numbers and the import order that style.md and design.md set, read from the source."""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "selfspec"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}

FLOORS = (
    ("errors", "config", "typed"),
    ("packed_linear", "files", "untrusted", "weight_files", "heads_folder"),
    ("gguf_header", "model_folder"),
    ("pretrained", "template"),
    (
        *("confidence", "file_pages", "kv_cache", "head_types", "heads", "judge", "stats", "hub"),
        *("given", "schedule", "scores", "text", "one_row", "fingerprint"),
    ),
    ("compiled", "parts"),
    ("executors",),
    ("conformance", "backbone", "hooks", "model_watch", "row_mixing"),
    ("hidden_cache",),
    ("state", "probe"),
    ("drafters", "controllers", "acceptance", "lossy"),
    ("decode",),
    ("keywords", "request", "stream", "costs", "tuned"),
    ("session", "generate"),
    ("__init__",),
    ("training", "eval"),
    ("visualise",),
    ("cli",),
    ("__main__",),
)
"""Modules import from their own floor and from those above in this list, never from below."""

HEIGHT = {name: height for height, names in enumerate(FLOORS) for name in names}
RUNTIME = {name for names in FLOORS[: HEIGHT["training"]] for name in names}
NOT_IN_RUNTIME = {"datasets", "matplotlib"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> list[Function]:
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def length(node: Function) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def public_definitions(body: list[ast.stmt]) -> Iterator[Function | ast.ClassDef]:
    """Public classes and functions, and the public methods of public classes."""
    for node in body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node.body)


def untyped(node: Function) -> bool:
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    every += [entry for entry in (node.args.vararg, node.args.kwarg) if entry]
    bare = [arg for arg in every if arg.annotation is None and arg.arg not in ("self", "cls")]
    return bool(bare) or node.returns is None


def top(path: Path) -> str:
    """The module or subpackage of selfspec that a file belongs to."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything imported, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "relative import"
            if node.module == "selfspec":
                yield from (f"selfspec.{alias.name}" for alias in node.names)
            else:
                yield node.module


def internal(tree: ast.AST) -> set[str]:
    """Which modules and subpackages of selfspec are imported; other names are the package's own."""
    parts = [name.split(".") for name in imported(tree) if name.split(".")[0] == "selfspec"]
    return {part[1] if len(part) > 1 and part[1] in HEIGHT else "__init__" for part in parts}


def test_no_file_outgrows_its_limit() -> None:
    limits = {"decode.py": 250}
    counts = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    too_long = {path.name: n for path, n in counts.items() if n > limits.get(path.name, 400)}
    assert not too_long


def test_functions_stay_short() -> None:
    lengths = {
        f"{path.name}:{node.name}": length(node)
        for path, tree in TREES.items()
        for node in functions(tree)
    }
    assert not {name: n for name, n in lengths.items() if n > 80}
    assert statistics.median(lengths.values()) <= 15
    assert statistics.quantiles(lengths.values(), n=10)[-1] <= 50


def test_public_api_is_documented() -> None:
    nodes = {
        f"{path.name}:{getattr(node, 'name', 'module')}": ast.get_docstring(node) is not None
        for path, tree in TREES.items()
        for node in [tree, *public_definitions(tree.body)]
    }
    missing = [name for name, documented in nodes.items() if not documented]
    assert len(missing) <= 0.05 * len(nodes), missing
    assert not [name for name in missing if name.endswith(":module")]


def test_public_api_is_fully_typed() -> None:
    bare = [
        f"{path.name}:{node.name}"
        for path, tree in TREES.items()
        for node in public_definitions(tree.body)
        if isinstance(node, Function) and untyped(node)
    ]
    assert not bare


def test_every_module_has_a_floor() -> None:
    unknown = {top(path) for path in SOURCES} - HEIGHT.keys()
    assert not unknown, "say in FLOORS which modules may import them"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    own = top(path)
    upward = {name for name in internal(TREES[path]) if HEIGHT[name] > HEIGHT[own]}
    assert not upward
    if own in ("training", "eval"):
        assert not internal(TREES[path]) & ({"training", "eval"} - {own})


def test_runtime_needs_no_training_or_plotting_packages() -> None:
    found = {
        (path.name, name)
        for path, tree in TREES.items()
        if top(path) in RUNTIME
        for name in imported(tree)
        if name.split(".")[0] in NOT_IN_RUNTIME
    }
    assert not found


def test_nothing_that_ships_needs_the_laboratory() -> None:
    found = {
        (path.name, name)
        for path, tree in TREES.items()
        for name in imported(tree)
        if name.split(".")[0] in ("eval", "tests", "training")
    }
    assert not found


@pytest.mark.parametrize("module", ["selfspec", "selfspec.hub", "selfspec.cli.main"])
def test_import_does_not_load_torch(module: str) -> None:
    code = f"import sys, {module}; print({{'torch', 'transformers'}} & sys.modules.keys())"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=PACKAGE.parent,
    )
    assert result.stdout.strip() == "set()"
