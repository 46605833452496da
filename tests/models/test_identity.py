"""What a model's files are."""

from __future__ import annotations

from pathlib import Path

from minikv.models.identity import digests


def test_files_are_told_apart_a_large_one_by_samples(tmp_path: Path) -> None:
    """The rows of a tier and the cache of a saved chat are of these weights and this tokenizer."""
    weights, seen = bytearray(20 << 20), []
    for at in (0, 10 << 20):
        weights[at : at + (1 << 19)] = b"\1" * (1 << 19)
        (tmp_path / "model.safetensors").write_bytes(weights)
        seen.append(digests(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    seen.append(digests(tmp_path))
    first, second, third = seen
    assert first["weights"] != second["weights"] == third["weights"]
    assert first["tokenizer"] == second["tokenizer"] != third["tokenizer"]
