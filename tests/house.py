"""The house: which module of selfspec imports which. `python -m tests.house` prints the counts.

A room is a folder of the package or a module beside the folders; an arrow is an import from one
room into another. A module's floor is one above the highest that it imports.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "selfspec"
SOURCES = sorted(PACKAGE.rglob("*.py"))

Arrows = Mapping[str, set[str]]

WRITTEN_BY_HAND = {".py", ".cpp", ".hpp", ".js", ".css", ".html", ".jinja"}
NOT_OURS = {"results", "vendor"}


def lines() -> dict[str, int]:
    """Number of lines, blank ones too, by room of selfspec, and of tests/ and eval/."""
    counts: dict[str, int] = {}
    for top in (PACKAGE, *(PACKAGE.parent / name for name in ("tests", "eval"))):
        for path in top.rglob("*"):
            if path.suffix in WRITTEN_BY_HAND and not NOT_OURS & {*path.parts}:
                inner = path.relative_to(top).with_suffix("").parts[0]
                name = inner if top == PACKAGE else f"{top.name}/"
                count = len(path.read_text(encoding="utf-8").splitlines())
                counts[name] = counts.get(name, 0) + count
    return counts


def module(path: Path) -> str:
    """Dotted name within the package; a package's `__init__` has the package's name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module(path): path for path in SOURCES}


@functools.cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything imported, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                is_module = inner.removeprefix("selfspec.") in MODULES
                yield inner if is_module else node.module


@functools.cache
def module_arrows() -> dict[str, set[str]]:
    """Which modules of the package each one imports."""
    arrows = {}
    for name, path in MODULES.items():
        targets = {
            target.removeprefix("selfspec").removeprefix(".") or "__init__"
            for target in imported(trees()[path])
            if target.split(".")[0] == "selfspec"
        }
        arrows[name] = targets - {name}
    return arrows


def room_arrows() -> dict[str, set[str]]:
    """Imports between rooms."""
    arrows: dict[str, set[str]] = {}
    for name, targets in module_arrows().items():
        room = name.split(".")[0]
        arrows.setdefault(room, set()).update(target.split(".")[0] for target in targets)
        arrows[room].discard(room)
    return arrows


def circles(arrows: Arrows) -> list[set[str]]:
    """Groups that import each other, directly or indirectly."""
    reached = {name: _reached(name, arrows) for name in arrows}
    groups = {frozenset(b for b in reached[a] if a in reached[b]) for a in arrows}
    return [set(group) for group in groups if group]


def floors(arrows: Arrows) -> dict[str, int]:
    """Floor of each name, from 1 on; `arrows` must have no circles."""
    heights: dict[str, int] = {}

    def floor(name: str) -> int:
        if name not in heights:
            heights[name] = 1 + max((floor(target) for target in arrows.get(name, ())), default=0)
        return heights[name]

    for name in arrows:
        floor(name)
    return heights


def _reached(name: str, arrows: Arrows) -> set[str]:
    seen: set[str] = set()
    waiting = list(arrows.get(name, ()))
    while waiting:
        target = waiting.pop()
        if target not in seen:
            seen.add(target)
            waiting += arrows.get(target, ())
    return seen


def _print(kind: str, arrows: Arrows) -> None:
    rings = circles(arrows)
    height = "" if rings else f", {max(floors(arrows).values())} floors"
    count = sum(len(targets) for targets in arrows.values())
    print(f"{len(arrows)} {kind}, {count} imports between them, {len(rings)} circles{height}")
    for ring in rings:
        print("  circle:", ", ".join(sorted(ring)))


if __name__ == "__main__":
    _print("rooms", room_arrows())
    for room, floor in sorted(floors(room_arrows()).items(), key=lambda entry: -entry[1]):
        print(f"  {floor:2} {room}: {', '.join(sorted(room_arrows()[room]))}")
    _print("modules", module_arrows())
    for name, count in sorted(lines().items(), key=lambda entry: -entry[1]):
        print(f"  {count:6,} lines in {name}")
