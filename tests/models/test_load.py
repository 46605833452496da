"""What only the loading of a whole folder shows: files that do not fit each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from forked import run
from loaded import refused

from minikv import models
from minikv.models.errors import ModelError


def altered(path: Path, **changes: Any) -> None:
    data = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**data, **changes}))


@pytest.mark.parametrize("special", [True, False])
def test_a_token_that_the_embedding_lacks(tmp_path: Path, special: bool) -> None:
    """A control token that no chat has is no harm; a word that a text may have is."""
    folder = tiny.write(tmp_path)
    data = json.loads((folder / "tokenizer.json").read_text())
    text = "<|more|>" if special else "hello"
    about = {"id": 5000, "content": text, "special": special}
    data["added_tokens"].append(data["added_tokens"][0] | about)
    data["model"]["vocab"][text] = 5000
    (folder / "tokenizer.json").write_text(json.dumps(data))
    if special:
        assert models.load(folder).tokenizer.vocab == 5001
        (folder / "chat_template.jinja").write_text("<|more|>" + tiny.TEMPLATE)
    refused(lambda: models.load(folder), "a token 5,000, and the model's embedding has 260 rows")


def test_templates_that_write_nothing_or_have_no_usable_name(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path)
    file = folder / "chat_template.jinja"
    for template in ("", "{% if false %}{{ messages }}{% endif %}", " \n"):
        file.write_text(template)
        refused(lambda: models.load(folder), "writes nothing")
    file.unlink()
    for named in ({"name": {}}, {"name": {}, "template": "x"}, {"name": [], "template": {}}, {}, 3):
        altered(folder / "tokenizer_config.json", chat_template=[named])
        assert models.load(folder).template.name != "tokenizer_config.json", named


KEYS = "bos_token additional_special_tokens added_tokens_decoder legacy add_bos_token".split()


@pytest.mark.parametrize("value", [{}, [], 3, {"content": {}}, {"content": 3}, None, True])
@pytest.mark.parametrize("key", KEYS)
def test_odd_values_in_a_tokenizer_configuration(tmp_path: Path, key: str, value: Any) -> None:
    """Read or refused; never another error."""
    folder = tiny.write(tmp_path)
    for given in (value, [value], {"5": value}):
        altered(folder / "tokenizer_config.json", **{key: given})
        try:
            models.load(folder)
        except ModelError as error:
            assert "\n" not in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    ("file", "content", "code"),
    [
        ("config.json", "{", 6),
        ("config.json", '{"model_type": "gemma", "architectures": ["GemmaForCausalLM"]}', 3),
        ("model.safetensors", "", 6),
        ("tokenizer.json", "[]", 6),
        ("chat_template.jinja", "{% for", 6),
    ],
)
def test_the_program_says_it_and_leaves_with_that_code(
    tmp_path: Path, file: str, content: str, code: int
) -> None:
    folder = tiny.write(tmp_path / "bad")
    (folder / file).write_text(content)
    done = run("ask", "q", "-m", str(folder), "-", stdin="text")
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith("error: ")
    assert len(done.err.splitlines()) <= 2
    assert "Traceback" not in done.err
