"""What a forward is made of, read from its source: names, attributes and config fields it uses.

Comes in: a function of a transformers model. Goes out: a set of words, which an executor compares
with those it knows; one it does not know means that the layer may do what the executor does not.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

_OBJECTS = ("self", "module")
"""How methods, and the attention functions of transformers, call the module they work for."""

_CONFIG = "config"


@lru_cache(maxsize=512)
def words(function: Callable[..., Any]) -> frozenset[str]:
    """What `function` reads, stores and calls, and the functions of its file that it calls.

    `self.x` an attribute of the module; `config.x` a field of its config; `.x` an attribute of
    anything else; `x=` a keyword it passes on; `'x'` a string; `x` a name from outside; `self.x:=`
    an attribute that it sets; `position_ids!` that it computes with positions. Annotations do not
    count. Raises ValueError where the source cannot be read, or is not what runs.
    """
    found: set[str] = set()
    _collect(function, found, set())
    return frozenset(found)


def _collect(function: Callable[..., Any], found: set[str], seen: set[str]) -> None:
    """Add the words of `function`, and of those that it calls from its own file."""
    name = getattr(function, "__qualname__", type(function).__name__)
    function = _without_wrappers(function, name)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError) as error:
        raise ValueError(f"the source of {name} cannot be read") from error
    nodes = list(_evaluated(tree.body[0]))
    inner = _inner_names(nodes)
    for node in nodes:
        found |= _words_of(node, inner)
    scope = function.__globals__
    for called in sorted(found & scope.keys() - seen):
        seen.add(called)
        other = scope[called]
        if inspect.isfunction(other) and other.__module__ == function.__module__:
            _collect(other, found, seen)


def _without_wrappers(function: Any, name: str) -> Any:
    """What transformers' own wrappers (gradient checkpointing) call in evaluation."""
    while hasattr(function, "__wrapped__"):
        home = getattr(function, "__globals__", {}).get("__name__", "")
        if not home.startswith("transformers."):
            raise ValueError(f"{name} is wrapped by other code")
        function = function.__wrapped__
    if not inspect.isfunction(function):
        raise ValueError(f"{name} is no function of Python")
    return function


def _evaluated(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes below `tree` but annotations and documentation."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_text(child):
                yield child
                yield from _evaluated(child)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _inner_names(nodes: list[ast.AST]) -> set[str]:
    """Parameters and local variables."""
    names = {node.arg for node in nodes if isinstance(node, ast.arg)}
    return names | {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def _words_of(node: ast.AST, inner: set[str]) -> set[str]:
    """The words of one node, without those below it."""
    if isinstance(node, ast.Attribute):
        stored = ":=" if isinstance(node.ctx, ast.Store) else ""
        return {f"{_owner(node.value)}.{node.attr}{stored}"}
    if isinstance(node, ast.Call):
        return {f"{word.arg}=" for word in node.keywords if word.arg} | _by_name(node)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return {repr(node.value)}
    if isinstance(node, ast.Global | ast.Nonlocal):
        return {f"global {name}" for name in node.names}
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        known = node.id in inner or hasattr(builtins, node.id)
        return set() if known else {node.id}
    if isinstance(node, ast.BinOp | ast.Compare | ast.Subscript):
        parts = {part.id for part in ast.iter_child_nodes(node) if isinstance(part, ast.Name)}
        return {"position_ids!"} if "position_ids" in parts else set()
    return set()


def _by_name(call: ast.Call) -> set[str]:
    """What `getattr(self.config, "x", ..)` reads."""
    if not (isinstance(call.func, ast.Name) and call.func.id in ("getattr", "hasattr")):
        return set()
    name = call.args[1]
    if not (isinstance(name, ast.Constant) and isinstance(name.value, str)):
        return {"getattr"}
    return {f"{_owner(call.args[0])}.{name.value}"}


def _owner(node: ast.AST) -> str:
    """Whose attribute it is: the module's (self), its config's, or anything else's (nothing)."""
    if isinstance(node, ast.Name) and node.id in _OBJECTS:
        return "self"
    if isinstance(node, ast.Attribute) and node.attr == _CONFIG and _owner(node.value) == "self":
        return _CONFIG
    return ""
