"""The list of what Onward takes from torch's private parts is whole, and the installed torch has all of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from onward.trainer.torch_parts import PARTS, moved
from tests.support.ranks import ROOT

LISTED = {name for names in PARTS.values() for name in names}
SOURCES = sorted(path for folder in ("flows", "tasks", "trainer", "infra") for path in (ROOT / folder).rglob("*.py"))


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_names(path: Path) -> Iterator[str]:
    """Yield the dotted names of torch with a private part that a file imports, or reads from what it imports."""
    tree = ast.parse(path.read_text())
    known: dict[str, str] = {}  # name in the file -> dotted name in torch
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    known[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    yield alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        parts: list[str] = []
        value: ast.AST = node
        while isinstance(value, ast.Attribute):
            parts.insert(0, value.attr)
            value = value.value
        if parts and isinstance(value, ast.Name) and value.id in known:
            yield ".".join([known[value.id], *parts])


def test_every_private_name_of_torch_that_is_used_is_in_the_list() -> None:
    used = {(name, path) for path in SOURCES for name in private_names(path) if is_private(name)}
    assert [each for each in used if not any(f"{each[0]}.".startswith(f"{listed}.") for listed in LISTED)] == []


def test_the_installed_torch_has_every_part() -> None:
    assert list(moved()) == []


def test_what_is_gone_is_named_with_what_needs_it() -> None:
    parts = {"optimizers": ("torch._foreach_add_", "torch._foreach_gone_", "torch._no_module.name")}
    assert list(moved(parts)) == ["torch._foreach_gone_, torch._no_module.name: needed by optimizers"]
