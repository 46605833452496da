"""docs/architecture.md names files, classes and methods that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/architecture.md").read_text()
PICTURE = (ROOT / "docs/architecture.svg").read_text()


def known() -> set[str]:
    """Every `Class.name` of the sources: methods, attributes of `self` and annotated fields."""
    found: set[str] = set()
    for top in ("minikv", "kernels", "models"):
        for path in (ROOT / top).rglob("*.py"):
            for kind in ast.walk(ast.parse(path.read_text())):
                if not isinstance(kind, ast.ClassDef):
                    continue
                for node in ast.walk(kind):
                    if isinstance(node, ast.FunctionDef):
                        found.add(f"{kind.name}.{node.name}")
                    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                        found.add(f"{kind.name}.{node.target.id}")
                    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                        found.add(f"{kind.name}.{node.attr}")
    return found


@pytest.mark.parametrize("text", [PAGE, PICTURE], ids=["page", "picture"])
def test_the_files_exist(text: str) -> None:
    files = set(re.findall(r"\b((?:minikv|kernels|models|cli)/[\w/]*\.py)\b", text))
    assert len(files) >= 5
    assert [name for name in sorted(files) if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("text", [PAGE, PICTURE], ids=["page", "picture"])
def test_the_methods_exist(text: str) -> None:
    names = set(re.findall(r"\b([A-Z]\w+\.[a-z_]\w*)", text))
    assert len(names) >= 5
    assert sorted(names - known()) == []
