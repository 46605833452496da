"""Chats on disk: what comes back is what was saved; anything else is refused with the reason."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load, save
from small_chat import chat, held_of, say

import minikv
from minikv.chat.closing import Facts
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.cli import json_limits
from minikv.cli.saved import cache, transcript
from minikv.cli.saved.files import damage as damage_of
from minikv.cli.saved.identity import identity, model_identity
from minikv.cli.saved.keeper import Keeper
from minikv.cli.saved.listing import listing, newest
from minikv.cli.saved.transcript import Saved, header, read, resumed
from minikv.cli.terminal import Terminal
from minikv.errors import UsageError
from minikv.policies.roco import RoCo
from minikv.settings import Settings


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINIKV_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "chats"


def keeper(**given: Any) -> Keeper:
    return Keeper(Terminal(), **given)


def talked(**given: Any) -> ChatSession:
    """A chat of two turns with a document each, one more waiting."""
    session = chat(system="be brief", seed=4, **given)
    session.attach("A mill stands by the river. " * 8, "mill.txt")
    say(session, "Who owns\nthe mill?")
    session.attach("no name, and an é")
    say(session, "Why?")
    session.attach("waiting", "w.txt")
    return session


def saved(session: ChatSession, name: str = "one") -> Keeper:
    one = keeper()
    one.save(session, name)
    return one


def other_process(one: Keeper) -> None:
    """What the end of a process does to a chat that is open in it."""
    one.close()


def take_up(session: ChatSession, name: str = "one", **given: Any) -> Saved:
    """As a process that ends right after."""
    one = keeper()
    try:
        return one.load(session, name, **given)
    finally:
        other_process(one)


def state(session: ChatSession) -> tuple[object, ...]:
    return (
        list(session.messages),
        list(session.documents),
        list(session.pending),
        list(session.fed),
        session.pending_token,
        session.turn,
        list(session.turns),
        session.evicted_for_turn,
        session.eviction,
        session.seed,
        list(session.curve),
        held_of(session),
    )


@pytest.mark.parametrize(
    ("policy", "budget"), [("adakv", 48), ("streaming", "20%"), ("full", 512), ("h2o", "48KiB")]
)
def test_a_chat_goes_on_as_if_it_had_never_been_closed(policy: str, budget: int | str) -> None:
    session = talked(policy=policy, budget=budget)
    other_process(saved(session))
    before = state(session)
    want = say(session, "And now?"), say(session, "Then?"), held_of(session)
    fresh = chat("adakv", 40, seed=9)
    say(fresh, "something else first")
    take_up(fresh, "one")
    assert state(fresh) == before
    assert fresh.report == fresh.turns[-1].report
    assert fresh.system == "be brief"
    assert (say(fresh, "And now?"), say(fresh, "Then?"), held_of(fresh)) == want


def test_what_eviction_lost_comes_back_with_the_record() -> None:
    session = chat(reuse="auto", refresh_every=3)
    session.recall.kind = "ram"
    session.attach("A mill stands by the river. " * 8)
    say(session, "Who?")
    report = session.report
    assert report is not None
    assert report.fidelity is not None
    assert report.refreshes == 2
    other_process(saved(session))
    fresh = chat()
    take_up(fresh)
    assert fresh.report == report


def test_every_turn_is_saved_and_what_is_no_longer_named_goes(home: Path) -> None:
    session, one = chat(undo_turns=16), keeper()
    one.keep(session)
    assert not home.exists()  # nothing was said
    session.attach("A mill stands by the river. " * 8, "mill.txt")
    one.keep(session)
    assert not home.exists()
    say(session, "Who?")
    one.keep(session)
    assert one.name is not None
    folder = home / one.name
    for path in (home, folder):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    one.keep(session)  # nothing changed
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == first
    (folder / ".cache-0.safetensors.1.tmp").write_text("left over")
    say(session, "Why?")
    one.keep(session)
    names = sorted(path.name.split("-")[0].split(".")[0] for path in folder.iterdir())
    assert names == ["cache", "chat", "document", "lock"]
    assert len(read(one.name).turns) == 2
    session.undo(2)
    one.keep(session)
    left = read(one.name)
    assert left.turns == ()
    assert [document.name for document in left.pending] == ["mill.txt"]
    session.reset()
    say(session, "Another conversation")
    one.keep(session)
    assert len(list(home.iterdir())) == 2
    assert len(read(one.name).turns) == 1


def test_names_lists_and_the_newest(home: Path) -> None:
    assert listing() == []
    with pytest.raises(UsageError, match="no saved chat in"):
        newest()
    session, one = talked(), keeper()
    one.save(session, "first")
    os.utime(home / "first" / "chat.jsonl", (1, 1))
    one.save(session, "second")  # the same chat, under another name
    assert not (home / "first").exists()
    third = keeper()
    third.save(session, "third")
    os.utime(home / "second" / "chat.jsonl", (2, 2))
    (home / "broken").mkdir()
    (home / "broken" / "chat.jsonl").write_text("{")
    (home / "stray").write_text("")
    assert [entry.name for entry in listing() if not entry.damaged] == ["third", "second"]
    assert next(entry.name for entry in listing()) == "broken"
    assert newest() == "third"
    entry = next(entry for entry in listing() if entry.name == "third")
    assert (entry.turns, entry.title) == (2, "Who owns the mill?")
    with pytest.raises(UsageError, match="there is a chat second already"):
        third.save(session, "second")
    assert third.name == "third"
    for name in ("", "../x", ".x", "a/b", "a b", "x" * 65, "a\n"):
        with pytest.raises(UsageError, match="cannot be the name"):
            third.save(session, name)
        with pytest.raises(UsageError, match="cannot be the name"):
            third.load(session, name)
    with pytest.raises(UsageError, match="no saved chat 'nope'") as error:
        third.load(session, "nope")
    assert "third" in error.value.hint


def test_a_chat_that_is_open_elsewhere_is_left_alone() -> None:
    session = talked()
    one = saved(session)
    fresh = chat()
    with pytest.raises(UsageError, match="is open in another minikv"):
        take_up(fresh, "one")
    assert fresh.turns == []
    one.load(session, "one")  # here it may be taken up again
    other_process(one)
    take_up(fresh, "one")
    assert len(fresh.turns) == 2


def other_byte(path: Path) -> None:
    """Another byte in the middle, and the same length."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def by_a_link(path: Path) -> None:
    moved = path.rename(path.with_name("elsewhere"))
    path.symlink_to(moved)


@pytest.mark.parametrize(
    "damage", [other_byte, by_a_link, Path.unlink, lambda p: p.write_bytes(b"")]
)
def test_a_document_damaged_while_the_chat_is_open_is_written_again(
    home: Path, damage: Callable[[Path], object]
) -> None:
    session = talked()
    one = saved(session)
    for path in sorted((home / "one").glob("document-*")):
        damage(path)
    say(session, "And now?")
    one.save(session)
    before = state(session)
    other_process(one)
    fresh = chat()
    take_up(fresh)
    assert state(fresh) == before


def exchanged(path: Path) -> None:
    path.unlink()
    path.touch(0o600)


@pytest.mark.parametrize("change", [Path.unlink, exchanged])
def test_a_lock_that_was_removed_or_exchanged_is_noticed(
    home: Path, change: Callable[[Path], object], capsys: pytest.CaptureFixture[str]
) -> None:
    """It is taken again where nobody has the chat. Another process that took it up, or that saved
    it, keeps what it has."""
    session = talked()
    one = saved(session)
    change(home / "one" / "lock")
    say(session, "And now?")
    one.save(session)
    with pytest.raises(UsageError, match="is open in another minikv"):
        take_up(chat())  # it is locked again

    change(home / "one" / "lock")
    other, fresh = keeper(), chat()
    other.load(fresh, "one")
    say(session, "Here?")
    with pytest.raises(UsageError, match="is open in another minikv"):
        one.save(session)
    say(fresh, "There?")
    other.save(fresh)
    other_process(other)
    for name in (None, "two"):
        with pytest.raises(UsageError, match="another minikv has saved chat one"):
            one.save(session, name)
    one.keep(session)
    assert "this chat is not saved: another minikv has saved" in capsys.readouterr().err
    assert [turn.question for turn in read("one").turns][-1] == "There?"

    one.fork(session, "two")
    assert [turn.question for turn in read("two").turns][-1] == "Here?"
    assert [turn.question for turn in read("one").turns][-1] == "There?"


# -- refused ------------------------------------------------------------------------------


def model(folder: Path, weights: bytes = b"weights", config: str = "{}") -> Facts:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return Facts(model=str(folder))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s, f: setattr(s, "facts", model(f / "b", b"Weights")), "model b here, a there"),
        (lambda s, f: setattr(s, "facts", model(f / "a", b"Weights")), "weights"),
        (lambda s, f: setattr(s, "facts", model(f / "a", config="{ }")), "weights"),
        (lambda s, f: setattr(s, "facts", replace(s.facts, revision="abc")), "revision abc here"),
        (lambda s, f: (f / "a" / "tokenizer.json").write_text("[]"), "tokenizer"),
        (
            lambda s, f: setattr(s, "facts", replace(s.facts, dtype="bfloat16")),
            "dtype bfloat16 here, float32 there",
        ),
        (
            lambda s, f: setattr(s, "facts", replace(s.facts, weights="int8")),
            "form int8 here, plain there",
        ),
        (
            lambda s, f: setattr(s, "facts", replace(s.facts, kv="int8")),
            "kv int8 here, float32 there",
        ),
    ],
)
def test_another_model_tokenizer_or_dtype_is_refused_by_name(
    change: Callable[[ChatSession, Path], object], said: str, tmp_path: Path
) -> None:
    session = talked(facts=model(tmp_path / "a"))
    other_process(saved(session))
    fresh = chat(facts=session.facts)
    take_up(fresh, "one")
    fresh.reset()
    before = state(fresh)
    change(fresh, tmp_path)
    with pytest.raises(UsageError, match="does not belong to this run") as error:
        take_up(fresh, "one")
    assert said in str(error.value)
    assert "--reread" in error.value.hint
    assert state(fresh) == before
    take_up(fresh, "one", reread=True)  # which works with any model
    assert [turn.question for turn in fresh.turns] == ["Who owns\nthe mill?", "Why?"]


def test_a_large_file_of_weights_is_told_apart_by_samples(tmp_path: Path) -> None:
    weights = bytearray(20 << 20)
    session = chat(facts=model(tmp_path / "a", bytes(weights)))
    one = identity(session, model_identity(session))["weights"]
    weights[10 << 20 : (10 << 20) + (1 << 19)] = b"\1" * (1 << 19)
    model(tmp_path / "a", bytes(weights))
    assert identity(session, model_identity(session))["weights"] != one


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other_process(saved(talked()))
    monkeypatch.setattr(minikv, "__version__", "9.9")
    with pytest.raises(UsageError, match=r"minikv 9\.9 here, 0\.\d+\.\d+ there"):
        take_up(chat(), "one")
    monkeypatch.setattr(transcript, "FORMAT", 2)
    with pytest.raises(UsageError, match="format 1, not 2"):
        take_up(chat(), "one")


@pytest.mark.parametrize(
    ("given", "eviction", "said"),
    [
        ({"policy"}, EvictionConfig.read("snapkv", budget=48), "policy snapkv here, adakv there"),
        (
            {"decode"},
            EvictionConfig.read("adakv", "tova", budget=48),
            "decode tova here, h2o there",
        ),
        ({"budget"}, EvictionConfig.read("adakv", budget=64), "budget 64 rows here, 48 rows there"),
        ({"options"}, EvictionConfig.read(budget=48, options={"window": 16}), "policy_options"),
    ],
)
def test_a_policy_that_the_user_insists_on_is_compared(
    given: set[str], eviction: EvictionConfig, said: str
) -> None:
    other_process(saved(talked()))
    fresh = chat()
    fresh.configure(eviction)
    with pytest.raises(UsageError, match="does not belong to this run") as error:
        take_up(fresh, "one", given=given)
    assert said in str(error.value)
    assert fresh.turns == []
    one = keeper()
    one.load(fresh, "one")  # without insisting, the chat's own policy is taken
    assert fresh.eviction == EvictionConfig.read("adakv", budget=48)
    one.load(fresh, "one", given=given)  # now they are alike


def test_reading_again_takes_the_settings_that_the_user_insists_on() -> None:
    other_process(saved(talked()))
    fresh = chat()
    fresh.configure(EvictionConfig.read("snapkv", budget=64))
    fresh.seed = 77
    take_up(fresh, "one", reread=True, given={"policy", "seed"})
    assert (fresh.eviction.policy, fresh.seed, fresh.fed) == ("snapkv", 77, [])
    say(fresh, "And now?")
    assert fresh.turn == 3
    stats: Any = fresh.engine.kv.stats()
    assert stats.kept_mean <= 64


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif how == "one byte less":
        path.write_bytes(data[:-1])
    elif how == "longer":
        path.write_bytes(data + b"x")
    elif how == "a bit":
        path.write_bytes(
            data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
        )
    elif how == "link":
        path.rename(path.with_suffix(".real"))
        path.symlink_to(path.with_suffix(".real"))
    elif how == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif how == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(os.urandom(len(data)))


HOW = [
    "gone",
    "empty",
    "cut",
    "one byte less",
    "longer",
    "a bit",
    "link",
    "pipe",
    "folder",
    "noise",
]


@pytest.mark.parametrize("how", HOW)
def test_damaged_files_are_refused_with_the_reason(home: Path, how: str) -> None:
    session = talked()
    fresh = chat()
    say(fresh, "mine")
    before = state(fresh)
    for number, pattern in enumerate(("chat.jsonl", "cache-*", "document-*")):
        if (how, pattern) == ("one byte less", "chat.jsonl"):
            continue  # the last newline: nothing is lost
        name = f"chat{number}"
        other_process(saved(session, name))
        damage(min((home / name).glob(pattern)), how)
        with pytest.raises(UsageError, match=r"damaged|cannot be read|no saved chat"):
            take_up(fresh, name)
        assert state(fresh) == before
        if pattern == "cache-*":  # the conversation is not lost with it
            take_up(fresh, name, reread=True)
            assert len(fresh.turns) == 2
            fresh.reset()
            say(fresh, "mine")
            before = state(fresh)


def test_a_librarys_words_are_one_line_that_a_terminal_shows() -> None:
    with pytest.raises(UsageError, match="is damaged: no such I32 kind") as caught, damage_of("x"):
        raise ValueError("no such \ufeffI32\x1b\n kind" + "." * 500)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 250


def test_a_cache_with_other_figures_per_token_is_no_damage(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version whose policy stored something else saved it."""
    with monkeypatch.context() as then:
        then.setattr(RoCo, "total", "sum")
        other_process(saved(talked(decode="roco"), "old"))
    fresh = chat()
    with pytest.raises(UsageError, match="another version of minikv: adakv with roco") as refused:
        take_up(fresh, "old")
    assert "--reread" in str(refused.value.hint)
    take_up(fresh, "old", reread=True)
    assert len(fresh.turns) == 2


def rewrite(folder: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Edit a transcript and give it a checksum that fits."""
    import hashlib

    path = folder / "chat.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()][:-1]
    change(lines)
    body = "".join(json.dumps(line) + "\n" for line in lines).encode()
    end = {"kind": "end", "sha256": hashlib.sha256(body).hexdigest()}
    path.write_bytes(body + json.dumps(end).encode() + b"\n")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: lines.pop(), "turns or documents"),
        (lambda lines: lines.pop(0), "damaged"),
        (lambda lines: lines[0]["identity"].update(policy="snapkv"), "another chat or"),
        (lambda lines: lines[0]["identity"].update(fed="0"), "another chat or"),
        (lambda lines: lines[0]["identity"].update(budget="12 parsecs"), "damaged"),
        (lambda lines: lines[0]["identity"].update(documents=[]), "turns or documents"),
        (lambda lines: lines[0].update(curve=[[1]]), "damaged"),
        (lambda lines: lines[0].update(seed="x"), "damaged"),
        (lambda lines: lines[0]["cache"].update(file="../../etc/passwd"), "not a file of a chat"),
        (lambda lines: lines[0]["cache"].update(bytes=1 << 60), "too large"),
        (lambda lines: lines[1].update(file="cache-0"), "not a file of a chat"),
        (lambda lines: lines[-1]["record"].pop("tokens"), "no key record.tokens"),
        (lambda lines: lines[-1]["record"].update(extra=1), "extra"),
        (lambda lines: lines[-1].update(documents=[7]), "damaged"),
    ],
)
def test_edited_transcripts_are_refused_although_the_checksum_fits(
    home: Path, change: Callable[[list[dict[str, Any]]], None], said: str
) -> None:
    other_process(saved(talked()))
    rewrite(home / "one", change)
    fresh = chat()
    before = state(fresh)
    with pytest.raises(UsageError) as error:
        take_up(fresh, "one")
    assert said in str(error.value)
    assert state(fresh) == before


@pytest.mark.parametrize("part", ["column.k", "column.pos", "fed", "column.sum"])
def test_a_cache_that_does_not_fit_the_transcript_is_refused(home: Path, part: str) -> None:
    """With checksums that fit, as an edit by a program would leave it."""
    import hashlib

    other_process(saved(talked()))
    path = min((home / "one").glob("cache-*"))
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    written = json.loads(data[8 : 8 + length])["__metadata__"]
    for change in ("shorter", "gone", "other kind", "other numbers"):
        tensors = load(data)
        if change == "gone":
            del tensors[part]
        elif change == "shorter":
            tensors[part] = tensors[part][1:].clone()
        elif change == "other kind":
            tensors[part] = tensors[part].to(torch.float16)
        elif part != "fed":
            continue  # numbers in a column are as good as any; the checksum holds them
        else:
            tensors[part] = tensors[part] + 1
        edited = save(tensors, written)
        path.write_bytes(edited)

        def fit(lines: list[dict[str, Any]], edited: bytes = edited) -> None:
            mark = hashlib.sha256(edited).hexdigest()
            lines[0]["cache"].update(bytes=len(edited), sha256=mark)

        rewrite(home / "one", fit)
        fresh = chat()
        with pytest.raises(UsageError, match=r"damaged|another version"):
            take_up(fresh, "one")
        assert fresh.fed == []


def test_a_cache_too_large_to_save_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "CACHE_BYTES", 100)
    session = talked()
    other_process(saved(session))
    fresh = chat()
    with pytest.raises(UsageError, match=r"has no cache: it held .* and at most 100 B are saved"):
        take_up(fresh, "one")
    take_up(fresh, "one", reread=True)
    assert fresh.messages == session.messages
    assert fresh.curve == session.curve
    say(fresh, "And now?")
    assert fresh.reports[-1].tokens.prompt_reused == 0


# -- saves that fail ----------------------------------------------------------------------


PanicException = type("PanicException", (BaseException,), {})


@pytest.mark.parametrize("error", [MemoryError, PanicException])
def test_memory_that_is_short_for_a_save_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: type[BaseException],
) -> None:
    """The library of safetensors raises what is no Exception."""

    def short(tensors: object, metadata: object) -> bytes:
        raise error

    monkeypatch.setattr(safetensors.torch, "save", short)
    session, one = talked(), keeper()
    one.keep(session)
    assert "this chat is not saved: out of memory" in capsys.readouterr().err
    with pytest.raises(UsageError, match="cannot be saved: out of memory"):
        one.save(session)
    error = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        one.keep(session)


def test_a_save_that_fails_warns_once_and_the_chat_goes_on(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session, one = talked(), keeper()
    one.keep(session)
    assert one.name is not None
    before = read(one.name)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for i in range(3):
            say(session, f"question {i}")
            one.keep(session)
        with pytest.raises(UsageError, match="No space left"):
            one.save(session)
    said = capsys.readouterr().err
    assert said.count("this chat is not saved: No space left on device") == 1
    assert read(one.name) == before  # and no half of a newer one beside it
    assert not list((home / one.name).glob(".*"))
    one.keep(session)
    assert len(read(one.name).turns) == 5


def test_a_first_save_that_fails_leaves_no_directory(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, one = talked(), keeper()

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UsageError, match="No space left"):
            one.save(session, "x")
    assert os.listdir(home) == []
    assert one.name is None
    one.save(session, "x")
    assert len(read("x").turns) == 2


def test_a_save_that_fails_at_the_transcript_leaves_nothing_behind(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cache and its documents were written before: on a full disk they would stay for ever."""
    session, one = talked(), keeper()
    one.save(session, "one")
    before = set(os.listdir(home / "one"))
    say(session, "three")
    real = os.replace

    def full(source: Path, target: Path) -> None:
        if target.name == "chat.jsonl":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        one.keep(session)
    assert set(os.listdir(home / "one")) == before
    assert len(read("one").turns) == 2
    one.keep(session)
    assert len(read("one").turns) == 3


def test_the_records_of_earlier_turns_are_not_made_again(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a chat of 10,000 turns, that took seconds after each answer."""
    session, one = talked(), keeper()
    one.save(session, "one")
    made: list[object] = []
    real = transcript._turn_line
    monkeypatch.setattr(
        transcript, "_turn_line", lambda turn, at: made.append(turn) or real(turn, at)
    )
    say(session, "three")
    one.keep(session)
    assert made == [session.turns[-1]]
    assert read("one").turns == tuple(session.turns)
    session.undo(2)
    say(session, "other")
    one.keep(session)
    assert len(made) == 2
    assert read("one").turns == tuple(session.turns)


def test_a_home_that_cannot_be_written_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINIKV_HOME", str(tmp_path / "file"))
    session, one = talked(), keeper()
    for _ in range(2):
        one.keep(session)
        say(session, "more")
    assert capsys.readouterr().err.count("this chat is not saved: ") == 1
    with pytest.raises(UsageError, match="cannot be saved"):
        one.save(session, "x")


def test_every_write_may_be_the_one_that_fails(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chat on disk is the old one or the new one, whole, wherever a save is cut off."""
    session, one = talked(), keeper()
    one.save(session, "one")
    say(session, "three")
    real = {name: getattr(os, name) for name in ("open", "fsync", "replace", "unlink", "listdir")}
    for fatal in range(100):
        calls = 0

        def counted(name: str, fatal: int = fatal) -> Callable[..., Any]:
            def call(*arguments: Any, **given: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls > fatal:
                    raise OSError(errno.EIO, "broken")
                return real[name](*arguments, **given)

            return call

        with monkeypatch.context() as patch:
            for name in real:
                patch.setattr(os, name, counted(name))
            one.keep(session)
        found = read("one")
        assert len(found.turns) in (2, 3)
        if calls <= fatal:
            break
        fresh = chat()
        other_process(one)
        take_up(fresh, "one")
        assert len(fresh.turns) == len(found.turns)
    assert 5 < fatal < 99
    assert len(found.turns) == 3


def test_documents_without_end_are_not_saved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transcript, "DOCUMENT_BYTES", 100)
    keeper().keep(talked())
    assert "of text, more than the 100 B that are stored" in capsys.readouterr().err


def test_no_save_saves_nothing_until_asked(home: Path) -> None:
    session, one = talked(), keeper(active=False)
    one.keep(session)
    assert not home.exists()
    one.save(session, "asked")
    say(session, "more")
    one.keep(session)
    assert len(read("asked").turns) == 3


# -- settings and processes ---------------------------------------------------------------


def test_settings_of_a_saved_chat_build_it_again(tmp_path: Path) -> None:
    session = talked(facts=model(tmp_path / "a"), pin_system=True)
    saved(session)
    top = header("one")
    settings = resumed(Settings(), top, ())
    assert settings.model == str(tmp_path / "a")
    assert (settings.system, settings.seed, settings.pin_system) == ("be brief", 4, True)
    assert (settings.dtype, settings.policy) == ("float32", "full")
    stated = Settings(model="x/y", seed=1, policy="snapkv", budget="64")
    settings = resumed(stated, top, {"model", "seed", "policy", "budget"})
    assert (settings.model, settings.revision, settings.seed) == ("x/y", None, 1)
    assert (settings.policy, settings.budget) == ("snapkv", "64")


def test_a_header_that_does_not_say_how_the_chat_was_run_is_refused(home: Path) -> None:
    saved(talked())
    rewrite(home / "one", lambda lines: lines[0]["run"].pop("model"))
    with pytest.raises(UsageError, match="damaged: it does not say how it was run"):
        header("one")


_GO_ON = """
import sys, minikv
from minikv.cli.saved.keeper import Keeper
from minikv.cli.saved.listing import newest
from minikv.cli.saved.transcript import header, resumed
from minikv.loader import build
from minikv.settings import Settings
from minikv.cli.terminal import Terminal
session = build(resumed(Settings(), header(newest()), ()))
Keeper(Terminal()).load(session, newest())
print("".join(session.ask(sys.argv[1], 12)), *session.fed, sep="|")
"""


@pytest.mark.parametrize("tier", ["none", "file"])
def test_a_new_process_gives_the_same_next_answer(tier: str) -> None:
    session = minikv.load(budget=64, tier=tier)
    session.attach("The mayor of Velmora is Tarin Oskvin. " * 20, "mayor.txt")
    list(session.ask("Who is the mayor of Velmora?", 12))
    one = keeper()
    one.keep(session)
    question = "And of which town?"
    answer = "".join(session.ask(question, 12))
    session.recall.leave()
    other_process(one)
    found = subprocess.run(
        [sys.executable, "-c", _GO_ON, question], capture_output=True, text=True, timeout=300
    )
    assert found.stderr == ""
    assert found.stdout == "|".join([answer, *map(str, session.fed)]) + "\n"


def test_the_list_and_the_header_need_no_torch() -> None:
    other_process(saved(talked()))
    code = (
        "import sys; from minikv.cli import saving; "
        "from minikv.cli.saved import listing, transcript; "
        "listing.listing(); transcript.header('one'); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


# -- what anyone could have written, with a checksum that fits -------------------------------


def forge(home: Path, name: str, change: Callable[[list[Any]], None]) -> None:
    """Alter the lines of a saved transcript, and seal it again."""
    path = home / name / "chat.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()[:-1]]
    change(lines)
    body = "".join(json.dumps(line) + "\n" for line in lines)
    end = transcript._end(body.encode())
    path.write_text(body + json.dumps(end) + "\n")


def taken_up(name: str) -> bool:
    """Whether the chat can be taken up; if so, it can also be shown and go on."""
    fresh = chat()
    try:
        keeper().load(fresh, name, reread=True)
    except UsageError as error:
        assert name in str(error)  # noqa: PT017
        assert "\n" not in str(error)  # noqa: PT017
        return False
    for report in fresh.reports:
        report.lines()
    say(fresh, "And now?", 2)
    return True


HUGE = [float("inf"), float("nan"), -1, 10**4000, "9" * 5000, [], {}, None, True, "x", 1.5]
TREES = ["turns", "title", "identity", "seed", "curve", "pending", "system", "run", "cache"]


@pytest.mark.parametrize("key", TREES)
def test_a_forged_header_harms_no_other_chat(home: Path, key: str) -> None:
    session = talked()
    for name in ("good", "bad"):
        saved(session, name).close()
    whole = (home / "bad" / "chat.jsonl").read_bytes()
    for value in HUGE:
        (home / "bad" / "chat.jsonl").write_bytes(whole)
        forge(home, "bad", lambda lines, value=value: lines[0].__setitem__(key, value))  # type: ignore
        names = {entry.name: entry for entry in listing()}
        assert set(names) == {"good", "bad"}
        assert not names["good"].damaged
        assert newest() in ("good", "bad")
        if names["bad"].damaged:
            assert newest() == "good"
        taken_up("bad")
    fresh = chat()
    keeper().load(fresh, "good", reread=True)
    assert fresh.turns == session.turns


def test_forged_lines_are_refused_as_damage(home: Path) -> None:
    saved(talked(), "bad")
    whole = (home / "bad" / "chat.jsonl").read_bytes()
    count = len(whole.splitlines()) - 1
    tried = refused = 0
    for number in range(1, count):
        keys = json.loads(whole.splitlines()[number]).keys()
        for key in keys:
            for value in HUGE:
                (home / "bad" / "chat.jsonl").write_bytes(whole)
                forge(
                    home,
                    "bad",
                    lambda lines, n=number, k=key, v=value: lines[n].__setitem__(k, v),  # type: ignore
                )
                tried += 1
                refused += not taken_up("bad")
    assert refused > tried / 2


def test_a_transcript_without_end_is_not_read(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(talked(), "bad")
    monkeypatch.setattr(transcript, "TRANSCRIPT_BYTES", 1000)
    with pytest.raises(UsageError, match="larger than"):
        read("bad")
    with pytest.raises(UsageError, match=r"cannot be written|too large"):
        saved(talked(), "other")


def test_that_all_is_to_be_read_again_is_something_to_save() -> None:
    session = talked()
    one = saved(session)
    session.refresh()
    one.keep(session)
    other_process(one)
    again = chat()
    take_up(again)
    assert again.rereads


def test_a_title_is_one_line_of_the_list(home: Path) -> None:
    saved(talked(), "bad")
    forge(home, "bad", lambda lines: lines[0].__setitem__("title", "x\n\ny\n" + "z" * 999))
    (entry,) = listing()
    assert "\n" not in entry.title
    assert entry.title.startswith("x y zz")
    assert len(entry.title) <= 200


def test_a_budget_with_an_exponent_is_damage(home: Path) -> None:
    """As a fraction it would be computed to its last digit."""
    saved(talked(), "bad")
    for budget in ("1e99999999999 rows", "1/1e9999999 share", "٣ rows", "-1 rows", "0 rows"):
        forge(home, "bad", lambda lines, b=budget: lines[0]["identity"].__setitem__("budget", b))  # type: ignore[misc]
        with pytest.raises(UsageError, match="bad"):
            read("bad")


def test_a_document_is_named_in_one_line(home: Path) -> None:
    saved(talked(), "bad").close()
    assert read("bad").pending[0].name == "w.txt"

    def renamed(lines: list[Any]) -> None:
        next(line for line in lines if line.get("name") == "w.txt")["name"] = "a\n\nb"

    forge(home, "bad", renamed)
    with pytest.raises(UsageError, match="bad"):
        read("bad")


def test_a_transcript_of_many_parts_is_refused_before_it_is_parsed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(talked(), "bad")
    read("bad")
    monkeypatch.setattr(json_limits, "CONTAINERS", 10)
    with pytest.raises(UsageError, match="are too many"):
        read("bad")
