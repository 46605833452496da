"""`minikv doctor`: a healthy machine passes, and each kind of fault is found and named."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
import typer
from refusals import failing
from typed import body, printed, screen

import minikv
from minikv.cache.kv_cache import KVCache
from minikv.cli import doctor as examination
from minikv.cli.doctor import FAILED, OK, WARNING, Check, doctor, line, self_test
from minikv.cli.screen.terminal import in_columns
from minikv.cli.settings.config import Config, Interface
from minikv.cli.settings.flags import Call
from minikv.kernels.attention import cpu as prefill
from minikv.kernels.native import build, choice
from minikv.settings import Settings

SECRET = "hf_a_secret_that_must_not_be_seen"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No network, no configuration of this machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(examination, "_PATIENCE", 0.2)
    hub(monkeypatch, None, TimeoutError(SECRET))


def hub(monkeypatch: pytest.MonkeyPatch, token: str | None, answer: object) -> None:
    """A hub that answers every question with `answer`, or raises it."""

    def ask(*arguments: object) -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer() if callable(answer) else answer

    asked = SimpleNamespace(whoami=ask, model_info=ask)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: asked)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: token)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


def refusal(status: int) -> Exception:
    error = RuntimeError(SECRET)
    error.response = SimpleNamespace(status_code=status)  # type: ignore[attr-defined]
    return error


def run(**named: Any) -> tuple[int, str]:
    terminal = screen()
    try:
        settings = Settings(offline=named.pop("offline", False))
        body(doctor)(Call(terminal, Config()), settings, Interface(), **named)
    except typer.Exit as left:
        return left.exit_code, printed(terminal)
    return 0, printed(terminal)


# -- the self-test --------------------------------------------------------------------------
def test_the_bundled_model_answers_as_without_a_cache_under_its_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = self_test()
    assert (check.state, "'Henrik Torova' from 64 of " in check.detail) == (OK, True)
    # A cache that keeps all is found out.
    whole = minikv.load
    monkeypatch.setattr(minikv, "load", lambda budget, remember: whole(policy="full"))
    check = self_test()
    assert (check.state, "over the budget of 64" in check.detail) == (FAILED, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda mixed: 0.1 * mixed, "unlike attention without a cache"),
        (lambda mixed: mixed + torch.nan, "NumericsError"),
    ],
)
def test_a_cache_that_computes_something_else_is_found_out(
    quick: None, change: Callable[[Any], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = KVCache.attend
    monkeypatch.setattr(KVCache, "attend", lambda *a: change(honest(*a)))
    code, table = run(offline=True)
    assert code == 1
    assert message in table.split("failed   self-test ")[1]


# -- the hub --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("token", "answer", "state", "message"),
    [
        (SECRET, {"name": "ada"}, OK, "the token works, as ada"),
        (SECRET, refusal(401), FAILED, "it refuses the token"),
        (SECRET, refusal(403), FAILED, "it refuses the token"),
        (SECRET, refusal(503), WARNING, "HTTP status 503"),
        (SECRET, TimeoutError(SECRET), WARNING, "could not be reached"),
        (None, {"id": "x"}, OK, "it answers"),
        (None, refusal(401), WARNING, "HTTP status 401"),
        (None, ConnectionError(SECRET), WARNING, "could not be reached"),
        (None, lambda: time.sleep(3), WARNING, "could not be reached"),
    ],
)
@pytest.mark.usefixtures("quick")
def test_what_the_hub_says(
    monkeypatch: pytest.MonkeyPatch, token: str | None, answer: object, state: str, message: str
) -> None:
    hub(monkeypatch, token, answer)
    check = examination.hub(offline=False)
    assert (check.state, message in check.detail) == (state, True), check
    assert SECRET not in str(check)


def test_a_token_is_told_and_never_shown(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline nobody is asked."""
    assert "no token" in examination.hub(offline=True).detail
    hub(monkeypatch, SECRET, lambda: pytest.fail("touched the network"))
    check = examination.hub(offline=True)
    assert (check.state, check.detail.split(";")[0]) == (OK, "not contacted: offline")
    for token, variable, where in (
        (SECRET, "", "token stored by `hf auth login`"),
        (None, SECRET, "token set by HF_TOKEN"),
        (SECRET, SECRET, "token set by HF_TOKEN"),
    ):
        hub(monkeypatch, token, {"name": "ada"})
        monkeypatch.setenv("HF_TOKEN", variable)
        assert examination.hub(offline=True).detail == f"not contacted: offline; {where}"
    code, text = run()
    assert (code, "as ada" in text, SECRET in text) == (0, True, False)


# -- the machine ----------------------------------------------------------------------------
def test_every_check_has_a_line(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    code, table = run(offline=True)
    assert code == 0
    first, *_ = rows = [row for row in table.splitlines() if row[0] != " "]
    names = " ".join(row.split()[1] for row in rows)
    assert names == "versions cpu gpu kernels memory models hub self-test"
    assert torch.__version__ in first
    assert "\x1b" not in table
    text = line("models", Check(WARNING, "word " * 40, "do something " * 9))
    assert text.startswith("warning  models")
    for width in (40, 80, 200):
        assert max(map(len, in_columns(text, width).splitlines())) <= width
    # A check that breaks is a failed check.
    monkeypatch.setattr(examination.shutil, "disk_usage", failing(OSError("no such\ndevice")))
    code, text = run(offline=True)
    assert code == 1
    assert "failed   models    OSError: no such device" in text
    assert "ok       self-test" in text  # the others still ran


@pytest.mark.skipif(build.find() is None, reason="no C compiler on this system")
def test_the_processor_class_and_the_choice_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "processor", lambda: "amx")
    monkeypatch.setattr(choice, "tiles_refused", lambda: False)
    monkeypatch.setattr(prefill.Prefill, "available", lambda _: True)
    check = examination.kernels()
    chosen = "processor class amx: C for joined attention, prompt statistics, "
    assert f"compiled on this machine; {chosen}" in check.detail
    assert "; C with tiles for prompt attention" in check.detail
    assert "refuses" not in check.detail
    monkeypatch.setattr(choice, "tiles_refused", lambda: True)
    later = examination.kernels()
    assert check.state == later.state == OK
    assert later.detail.endswith("Linux refuses this process the tiles (AMX) of the processor")


def test_little_disk_and_a_locked_cache_are_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    left = SimpleNamespace(free=1 << 30)
    monkeypatch.setattr(examination.shutil, "disk_usage", lambda path: left)
    check = examination.disk()
    assert (check.state, "1.0 GiB free" in check.detail) == (WARNING, True)
    monkeypatch.setattr(examination.os, "access", lambda path, mode: False)
    assert "not writable" in examination.disk().hint


@pytest.mark.parametrize(
    ("flags", "slow"), [("avx2", True), ("avx2 avx512_bf16", False), ("", False)]
)
def test_a_processor_without_products_of_bfloat16_is_told(
    flags: str, slow: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("model name\t: A CPU\nflags\t\t: fpu avx2 avx512_bf16\nmodel name\t: B\n")
    assert examination.cpu_facts(path) == ("A CPU", {"fpu", "avx2", "avx512_bf16"})
    assert examination.cpu_facts(tmp_path / "nothing") == ("", set())
    monkeypatch.setattr(examination, "cpu_facts", lambda: ("A processor", {*flags.split()}))
    check = examination.cpu()
    assert (check.state, "multiplied in float32" in check.hint) == (OK, slow)
