"""Tests mirror the source: minikv/cache/prefill.py is tested by tests/cache/test_prefill.py."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
FOLDERS = ("minikv", "models")

ELSEWHERE = {
    "minikv/cache/attend.py": "cache/test_kv_cache.py",
    "minikv/cache/earlier.py": "cache/test_prefill.py",
    "minikv/cache/tier_rows.py": "cache/test_tier.py",
    "minikv/chat/eviction_config.py": "cli/settings/test_settings.py",
    "minikv/chat/transcript.py": "chat/test_session.py",
    "minikv/chat/turn.py": "chat/test_session.py",
    "minikv/engine/capture.py": "engine/test_decode_loop.py",
    "minikv/engine/engine.py": "engine/test_decode_loop.py",
    "minikv/engine/threads.py": "cli/test_threads.py",
    "minikv/errors.py": "cli/chat/test_ask.py",
    "minikv/policies/moments.py": "policies/test_invariants.py",
    "minikv/policies/base.py": "policies/test_invariants.py",
    "minikv/policies/critical.py": "policies/test_selection.py",
    "minikv/policies/expected.py": "policies/test_fixtures.py",
    "minikv/policies/nacl.py": "policies/test_selection.py",
    "minikv/policies/some_heads.py": "policies/test_rkv.py",
    "minikv/policies/streaming.py": "policies/test_fixtures.py",
    "minikv/policies/global_span.py": "policies/test_span.py",
    "minikv/settings.py": "cli/settings/test_settings.py",
    "models/blocks.py": "models/test_gguf.py",
    "models/builtin_templates.py": "models/test_templates.py",
    "models/checkpoint.py": "models/test_weights.py",
    "models/bundled/exam.py": "models/test_bundled.py",
    "models/bundled/world.py": "models/test_bundled.py",
    "models/errors.py": "models/test_weights.py",
    "models/identity.py": "models/test_files.py",
    "models/llama.py": "models/test_parity.py",
    "models/rope.py": "models/test_parity.py",
    "models/rendering.py": "models/test_templates.py",
    "models/split_patterns.py": "models/test_tokenizer.py",
    "models/sandbox.py": "models/test_templates.py",
    "models/tensors.py": "models/test_weights.py",
    "models/tokenizer_json.py": "models/test_tokenizer.py",
    "models/tokenizer_sp.py": "models/test_tokenizer.py",
    "models/tokenizer_tekken.py": "models/test_tokenizer.py",
    "models/vocabulary.py": "models/test_tokenizer.py",
}
"""Modules that share a test file with another one."""


def computes(module: Path) -> bool:
    """There is a function in it that does more than declare itself."""
    functions = [
        node
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return any(
        not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
        for function in functions
        for line in function.body
    )


def test_every_module_has_its_test_file() -> None:
    modules = [
        path.relative_to(ROOT)
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.name != "__init__.py" and computes(path)
    ]
    assert modules
    for module in modules:
        name, own = module.as_posix(), module.parts[0] == "minikv"
        folder = module.parent.relative_to("minikv") if own else module.parent
        mirror = folder / f"test_{module.name}"
        there = (TESTS / mirror).exists()
        assert there != (name in ELSEWHERE), f"{mirror} or a row of ELSEWHERE, not both"
        assert there or (TESTS / ELSEWHERE[name]).exists(), name
    assert {*ELSEWHERE} <= {module.as_posix() for module in modules}


def test_mutants_that_no_test_can_see_are_of_lines_that_stand() -> None:
    found = tomllib.loads((TESTS / "support/equivalent.toml").read_text())
    keys = [(path, key.split(" :: ")[0]) for path, reasons in found.items() for key in reasons]
    lines = {path: [*map(str.strip, (ROOT / path).read_text().splitlines())] for path in found}
    assert keys
    assert [(path, text) for path, text in keys if text not in lines[path]] == []
