"""The numbers and the import order that style.md and design.md set, read from the source."""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest

import selfspec
from tests import house
from tests.house import PACKAGE, SOURCES, trees

ORDER = (
    "errors, files pages, options, config cluster, model, hub, heads, decoding, api, "
    "training eval serve, adaptation, __init__, visualise plugins, cli, __main__"
)
"""Rooms import from their own floor and from those before in this list, never from below."""

FLOORS = [floor.split() for floor in ORDER.split(", ")]
HEIGHT = {name: height for height, names in enumerate(FLOORS) for name in names}
RUNTIME = {name for names in FLOORS[: HEIGHT["training"]] for name in names}
NOT_IN_RUNTIME = ("datasets", "matplotlib")
LABORATORY = ("eval", "tests", "training")

MOST_LINES = {
    "tests/": 27_443,
    "model": 6897,
    "decoding": 4746,
    "training": 3713,
    "eval": 2795,
    "eval/": 3438,
    "cli": 3246,
    "serve": 2988,
    "api": 2394,
    "heads": 1641,
    "visualise": 1542,
    "hub": 1630,
    "options": 599,
    "adaptation": 549,
    "config": 366,
    "files": 574,
    "pages": 187,
    "plugins": 179,
    "cluster": 128,
    "errors": 257,
    "__init__": 51,
    "__main__": 6,
}
"""A feature that does not fit its room replaces something, there or in another: the sum only falls.
Whoever deletes lowers them, with `python -m tests.house`."""

SPARE = 40
"""Lines that a room may lie below its budget before that is lowered."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> list[Function]:
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def public_definitions(body: list[ast.stmt]) -> Iterator[Function | ast.ClassDef]:
    for node in body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node.body)


def untyped(node: Function) -> bool:
    args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    args += [entry for entry in (node.args.vararg, node.args.kwarg) if entry]
    bare = [arg for arg in args if arg.annotation is None and arg.arg not in ("self", "cls")]
    return bool(bare) or node.returns is None


def room(path: Path) -> str:
    """The folder or module of selfspec that a file belongs to."""
    return house.module(path).split(".")[0]


def test_no_file_outgrows_its_limit() -> None:
    counts = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    too_long = {path.name: n for path, n in counts.items() if n > 900}
    assert not too_long


def test_rooms_keep_their_budgets() -> None:
    counts = house.lines()
    assert counts.keys() == MOST_LINES.keys()
    over = {name: n - MOST_LINES[name] for name, n in counts.items() if n > MOST_LINES[name]}
    assert not over, "lines too many; delete as many"
    under = {name: n for name, n in counts.items() if n < MOST_LINES[name] - SPARE}
    assert not under, "lower the budgets to these"


def test_functions_stay_short() -> None:
    lengths = {
        f"{path.name}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path, tree in trees().items()
        for node in functions(tree)
    }
    assert not {name: n for name, n in lengths.items() if n > 80}
    assert statistics.median(lengths.values()) <= 15


def test_public_api_is_documented() -> None:
    api = {name: getattr(selfspec, name) for name in selfspec.__all__}
    for name, kind in [*api.items()]:
        types = FunctionType | property | classmethod
        parts = vars(kind).items() if isinstance(kind, type) else ()
        api |= {f"{name}.{part}": value for part, value in parts if isinstance(value, types)}
    assert len(api) > 80
    assert not [name for name, value in api.items() if not value.__doc__ and "._" not in name]
    nodes = (node for tree in trees().values() for node in ast.walk(tree))
    definitions = (node for node in nodes if isinstance(node, Function | ast.ClassDef))
    texts = [ast.get_docstring(node) or "" for node in definitions]
    assert not [text for text in texts if text.startswith(("Of ", "As ", "That "))]


def test_public_api_is_fully_typed() -> None:
    bare = [
        f"{path.name}:{node.name}"
        for path, tree in trees().items()
        for node in public_definitions(tree.body)
        if isinstance(node, Function) and untyped(node)
    ]
    assert not bare


def test_imports_point_one_way() -> None:
    rooms = house.room_arrows()
    assert rooms.keys() == HEIGHT.keys(), "say in FLOORS which rooms may import it"
    upward = {
        f"{name} -> {target}"
        for name, targets in rooms.items()
        for target in targets
        if HEIGHT[target] > HEIGHT[name] or {name, target} == {"training", "eval"}
    }
    assert not upward


def test_nothing_imports_itself_by_way_of_others() -> None:
    assert not house.circles(house.room_arrows())
    assert not house.circles(house.module_arrows())


def test_executors_and_heads_do_not_know_who_runs_them() -> None:
    arrows = house.module_arrows()
    executors = {f"model.{name}" for name in ("generic", "fused", "recipe", "cuda_graph")}
    assert executors <= arrows.keys()
    for name, targets in arrows.items():
        if name in executors:
            assert "model.backbone" not in targets, name
        if name.startswith("heads."):
            assert not targets & executors, name


def test_shares_of_a_plain_step_are_made_in_one_place() -> None:
    modules = {
        house.module(path)
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
        if "plain_step" in ast.unparse(node.right)
    }
    assert modules <= {"decoding.costs"}


def test_circles_and_floors_are_found() -> None:
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert house.circles(arrows) == [{"b", "c"}]
    assert house.floors({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"c": 1, "b": 2, "a": 3}


def test_runtime_needs_no_training_or_plotting_and_nothing_the_laboratory() -> None:
    imports = {
        (path.name, name)
        for path, tree in trees().items()
        for name in house.imported(tree)
        if name.split(".")[0] in (*LABORATORY, *(NOT_IN_RUNTIME if room(path) in RUNTIME else ()))
    }
    assert not imports


@pytest.mark.parametrize(
    "done", ["import selfspec.hub.models", "from selfspec.cli.main import app; app()"]
)
def test_looking_for_a_file_and_all_help_load_no_torch(done: str) -> None:
    code = f"import sys; {done}; print({{'torch', 'transformers'}} & sys.modules.keys())"
    output = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=PACKAGE.parent)
    assert output.strip() == "set()"
