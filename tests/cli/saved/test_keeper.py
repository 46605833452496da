"""Chats on disk: what comes back is what was saved; anything else is refused with the reason."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import shutil
import signal
import sqlite3
import stat
from collections import Counter
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from fakes import ByteTokenizer, ThinkML
from refusals import failing, refused
from safetensors.torch import load, save
from small_chat import chat, held_of, say
from sqlite_calls import WRITES, before, edit, edit_facts

import minikv
from minikv.chat import stopping
from minikv.chat.closing import Facts
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.report import TurnReport
from minikv.chat.session import ChatSession
from minikv.cli.paths import chats_folder
from minikv.cli.saved import database, transcript
from minikv.cli.saved.keeper import Keeper
from minikv.cli.saved.listing import listing, newest
from minikv.cli.saved.transcript import Saved, held, read, resumed
from minikv.cli.screen.terminal import Terminal
from minikv.errors import UsageError
from minikv.policies.roco import RoCo
from minikv.settings import Settings

OLD = Path(__file__).parents[2] / "data" / "chat-1"
"""A chat as version 0.1.0 saved it, in the directory `old`, before chats were databases."""


pytestmark = pytest.mark.usefixtures("home")


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


def questions(chat: Any) -> list[str]:
    return [turn.question for turn in chat.turns]


def take_up(session: ChatSession, name: str = "one", **given: Any) -> Saved:
    """As a process that ends right after."""
    one = keeper()
    try:
        return one.load(session, name, **given)
    finally:
        one.close()


STATE = (
    "messages documents pending fed pending_token turn turns evicted_for_turn eviction seed curve"
).split()


def state(session: ChatSession) -> list[object]:
    return [*(copy(getattr(session, name)) for name in STATE), held_of(session)]


@pytest.mark.parametrize(
    ("policy", "budget"), [("adakv", 48), ("streaming", "20%"), ("full", 512), ("h2o", "48KiB")]
)
def test_a_chat_goes_on_as_if_it_had_never_been_closed(policy: str, budget: int | str) -> None:
    session, fresh = talked(policy=policy, budget=budget), chat("adakv", 40, seed=9)
    saved(session).close()
    before = state(session)
    say(fresh, "something else first")
    take_up(fresh)
    assert state(fresh) == before
    assert (fresh.report, fresh.system) == (fresh.turns[-1].report, "be brief")
    one, two = ((say(s, "And now?"), say(s, "Then?"), held_of(s)) for s in (session, fresh))
    assert one == two


def test_every_turn_is_saved_for_the_user_alone(home: Path) -> None:
    session, one = chat(), keeper()
    one.keep(session)
    session.attach("A mill stands by the river. " * 8, "mill.txt")
    one.keep(session)
    assert not home.exists()  # nothing was said
    say(session, "Who?")
    one.keep(session)
    path = home / str(one.name) / "chat.db"
    modes = [stat.S_IMODE(p.stat().st_mode) for p in (home, path.parent, path)]
    assert modes == [0o700, 0o700, 0o600]
    first = path.stat().st_mtime_ns
    one.keep(session)  # nothing changed
    assert path.stat().st_mtime_ns == first
    say(session, "Why?")
    one.keep(session)
    names = sorted(os.listdir(path.parent))
    assert (names, len(read(str(one.name)).turns)) == (["chat.db", "lock"], 2)
    session.undo(2)
    one.keep(session)
    left = read(str(one.name))
    assert (left.turns, [document.name for document in left.pending]) == ((), ["mill.txt"])
    session.reset()
    say(session, "Another conversation")
    one.keep(session)
    # Not the chat without a turn.
    assert (os.listdir(home), len(read(str(one.name)).turns)) == ([one.name], 1)
    session.undo()
    one.keep(session)
    one.close()
    assert (os.listdir(home), one.name) == ([], None)
    say(session, "Yet another")
    one.keep(session)
    other = talked()  # its number is lower, and it is another conversation all the same
    one.keep(other)
    one.close()
    assert sorted(entry.turns for entry in listing()) == [1, 2]


def test_a_chat_of_an_earlier_version_opens(home: Path) -> None:
    """Options of its policy that are gone are left out; a policy that is gone is refused in words,
    and gives way to another one."""
    session = talked()
    saved(session, "old").close()
    path = home / "old" / "chat.db"

    def older(facts: dict[str, Any], **changes: object) -> None:
        facts["identity"] |= changes
        facts["identity"]["policy_options"] |= {"gate": 0.0, "near": 3}

    edit_facts(path, "chat", older)
    edit_facts(path, "turn", lambda turn: turn["record"]["policy_options"].update(gate=0.0), 1)
    fresh = chat()
    take_up(fresh, "old")
    assert (fresh.eviction, fresh.fed) == (session.eviction, session.fed)
    assert fresh.report == session.report  # so /continue finds no other policy
    edit_facts(path, "chat", lambda facts: older(facts, policy="queryspan"))
    refused('queryspan is gone: `policy="global-span"`', take_up, chat(), "old")
    fresh = chat("adakv", 40)
    take_up(fresh, "old", given={"policy"}, reread=True)
    assert questions(fresh) == questions(session)


def test_a_chat_opens_that_was_left_after_an_undo() -> None:
    """Nothing was cached then, and the next question reads what is left of it. That all is to be
    read again is something to save."""
    session, fresh = talked(), chat()
    session.undo()
    assert session.fed == []
    saved(session, "left").close()
    take_up(fresh, "left")
    assert (fresh.turns, fresh.pending) == (session.turns, session.pending)
    for each in (session, fresh):
        say(each, "And now?")
    assert fresh.turns[-1].answer == session.turns[-1].answer
    session, again = talked(), chat()
    one = saved(session)
    session.refresh()
    one.keep(session)
    one.close()
    take_up(again)
    assert again.rereads


def test_names_lists_and_the_newest(home: Path) -> None:
    assert listing() == []
    refused("no saved chat in", newest)
    session, one, third = talked(), keeper(), keeper()
    one.save(session, "first")
    one.save(session, "second")  # the same chat, under another name
    assert os.listdir(home) == ["second"]
    third.save(session, "third")
    os.utime(home / "second" / "chat.db", (2, 2))
    for name, file in (("broken", "chat.db"), ("begun", "chat.db.new")):  # killed as it began
        (home / name).mkdir()
        (home / name / file).write_text("{")
        os.utime(home / name / file, (1, 1))
    (home / "stray").write_text("")
    (home / "empty").mkdir()
    damaged = {"third": False, "second": False, "begun": True, "broken": True}
    assert [(e.name, e.damaged) for e in listing()] == [*damaged.items()]
    assert newest() == "third"
    assert (listing()[0].turns, listing()[0].title) == (2, "Who owns the mill?")
    refused("there is a chat second already", third.save, session, "second")
    assert third.name == "third"
    for name in ("", "../x", ".x", "a/b", "a b", "x" * 65, "a\n"):
        for act in (third.save, third.load):
            refused("cannot be the name", act, session, name)
    for name in ("nope", "empty"):
        assert "third" in refused(f"no saved chat '{name}'", third.load, session, name).hint
    for name in ("broken", "begun"):
        refused(f"chat {name} (is damaged|cannot be read): ", third.load, session, name)


def test_a_chat_that_is_open_elsewhere_is_left_alone(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What another process saved stays."""
    session, fresh = talked(), chat()
    one = saved(session)
    refused("is open in another minikv", take_up, fresh)
    assert fresh.turns == []
    assert len(read("one").turns) == 2  # it can be read
    one.load(session, "one")  # and here it may be loaded again
    refused("is open in another minikv", take_up, fresh)
    one.close()
    take_up(fresh)
    assert len(fresh.turns) == 2
    one.save(session)  # a keeper that was closed opens it again
    refused("is open in another minikv", take_up, fresh)
    # One that was removed is written again.
    path, other = home / "one" / "chat.db", keeper()
    for left in (path.unlink, lambda: shutil.rmtree(home / "one")):
        left()
        one.save(session)
        assert read("one").turns == tuple(session.turns)
    shutil.copyfile(path, home / "copy")
    os.replace(home / "copy", path)
    (home / "one" / "lock").unlink()  # as of another machine, which does not see the lock
    other.load(fresh, "one")
    say(session, "Here?")
    say(fresh, "There?")
    other.save(fresh)
    other.close()
    for name in (None, "two"):
        refused("another minikv has saved chat one", one.save, session, name)
    one.keep(session)
    assert "this chat is not saved: another minikv has saved" in capsys.readouterr().err
    one.save(session, "two", fork=True)
    assert [questions(read(name))[-1] for name in ("one", "two")] == ["There?", "Here?"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_that_cannot_lock_is_said_once(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The chat is saved without a lock, and what another process saves meanwhile stays."""
    monkeypatch.setattr(fcntl, "flock", failing(OSError(number, os.strerror(number))))
    session, one, fresh, two = talked(), keeper(), chat(), keeper()
    one.save(session, "one")
    say(session, "And?")
    one.save(session)
    assert capsys.readouterr().err.count("cannot be locked: keep this chat open in one") == 1
    assert [entry.turns for entry in listing()] == [3]
    two.load(fresh, "one")
    assert state(fresh) == state(session)
    say(fresh, "There?")
    two.save(fresh)
    refused("another minikv has saved chat one", one.save, session)
    with monkeypatch.context() as patched:
        patched.setattr(database, "_connected", failing(OSError(errno.EIO, "no")))
        refused("chat one", one.load, session, "one")
    refused("another minikv has saved chat one", one.save, session)
    one.load(session, "one")
    assert state(session) == state(fresh)
    say(session, "Here?")
    one.save(session)
    two.close()


# -- refused ------------------------------------------------------------------------------
def model(home: Path, folder: str = "a", weights: bytes = b"weights", **texts: str) -> Facts:
    """Of a model there. texts: of its config and its tokenizer."""
    path = home / folder
    path.mkdir(parents=True, exist_ok=True)
    for name in ("config", "tokenizer"):
        (path / f"{name}.json").write_text(texts.get(name, "{}"))
    (path / "model.safetensors").write_bytes(weights)
    return Facts(model=str(path))


@pytest.mark.parametrize(
    ("files", "facts", "said"),
    [
        ({"folder": "b", "weights": b"Weights"}, {}, "model b here, a there"),
        ({"weights": b"Weights"}, {}, "weights"),
        ({"config": "{ }"}, {}, "weights"),
        ({"tokenizer": "[]"}, {}, "tokenizer"),
        ({}, {"revision": "abc"}, "revision abc here"),
        ({}, {"dtype": "bfloat16"}, "dtype bfloat16 here, float32 there"),
        ({}, {"weights": "int8"}, "form int8 here, plain there"),
        ({}, {"kv": "int8"}, "kv int8 here, float32 there"),
    ],
)
def test_another_model_tokenizer_or_dtype_is_refused_by_name(
    files: dict[str, Any], facts: dict[str, str], said: str, tmp_path: Path
) -> None:
    session = talked(facts=model(tmp_path))
    saved(session).close()
    fresh = chat(facts=session.facts)
    take_up(fresh)
    fresh.reset()
    before = state(fresh)
    fresh.facts = replace(model(tmp_path, **files) if files else fresh.facts, **facts)
    error = refused("does not belong to this run", take_up, fresh)
    assert said in str(error)
    assert "--reread" in error.hint
    assert state(fresh) == before
    take_up(fresh, reread=True)  # which works with any model
    assert questions(fresh) == ["Who owns\nthe mill?", "Why?"]


@pytest.mark.parametrize(
    ("stated", "more"),
    [
        ({"policy": "snapkv"}, {}),
        ({"decode": "tova"}, {"policy": "adakv"}),
        ({"budget": 64}, {"policy": "adakv"}),
        ({"options": {"window": 16}}, {}),
    ],
    ids=str,
)
def test_what_the_user_states_is_taken(stated: dict[str, Any], more: dict[str, Any]) -> None:
    """The chat's own policy and budget otherwise, and its cache if they are alike."""
    saved(talked()).close()
    fresh, one = chat(), keeper()
    fresh.configure(EvictionConfig.read(**stated))
    one.load(fresh, "one")
    assert (fresh.eviction, bool(fresh.fed)) == (EvictionConfig.read("adakv", budget=48), True)
    fresh.configure(EvictionConfig.read(**stated))
    one.load(fresh, "one", given={*stated})
    then = EvictionConfig.read(**{"budget": 48} | stated | more)
    assert (fresh.eviction, fresh.fed) == (then, [])
    say(fresh, "And now?")
    assert fresh.reports[-1].tokens.prompt_reused == 0
    one.save(fresh)
    one.load(fresh, "one", given={*stated})
    assert fresh.fed


# -- damaged, foreign and hostile files -----------------------------------------------------
@pytest.mark.parametrize("how", ["gone", "empty", "cut", "noise", "link", "pipe", "folder"])
@pytest.mark.parametrize(
    "file",
    "chat.db chat.jsonl document-4b2b54c8066a92b3.txt cache-81663c9ee5bb09bf.safetensors".split(),
)
def test_damaged_files_are_refused_with_the_reason(home: Path, how: str, file: str) -> None:
    """Of this version and of an earlier one; then nothing has changed."""
    if file == "chat.db":
        saved(talked()).close()
    else:
        shutil.copytree(OLD, home / "one")
    path = home / "one" / file
    data = path.read_bytes()
    path.unlink()
    if how == "pipe":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    elif how == "link":
        path.with_suffix(".real").write_bytes(data)
        path.symlink_to(path.with_suffix(".real"))
    elif how != "gone":
        changed = {"cut": data[: len(data) // 2], "noise": os.urandom(len(data)), "empty": b""}
        path.write_bytes(changed[how])
    fresh, files = chat(), set(os.listdir(home / "one"))
    say(fresh, "mine")
    before = state(fresh)
    for read_again in (False, True):
        error = refused(r"damaged|cannot be read|no saved chat", take_up, fresh, reread=read_again)
        assert "--reread" not in error.hint
    assert state(fresh) == before
    assert set(os.listdir(home / "one")) == files
    assert listing() == [] or listing()[0].name == "one"


def test_no_changed_bit_changes_a_chat(home: Path) -> None:
    """It is refused, with the reason, or it was where nothing is. The conversation is lost only
    where its own text was hit: if the hint says that --reread works, it does."""
    session = talked()
    saved(session).close()
    path, want, met = home / "one" / "chat.db", state(session), Counter[str]()
    texts, whole = (list(session.messages), list(session.documents)), path.read_bytes()
    page = int.from_bytes(whole[16:18])
    for at in sorted({*range(0, len(whole), 509), *range(page, len(whole), page)}):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        fresh = chat()
        try:
            take_up(fresh)
        except UsageError as error:
            assert str(error).startswith("chat one is damaged: ")  # noqa: PT017
            assert str(error).isprintable()  # noqa: PT017
            if "--reread" in error.hint:
                met["a value" if "checksum" in str(error) else "a page"] += 1
                take_up(fresh, reread=True)
                assert (list(fresh.messages), list(fresh.documents)) == texts
                say(fresh, "And now?")
                keeper().save(fresh, "again")
                assert read("again").turns == tuple(fresh.turns)
                shutil.rmtree(home / "again")
            else:
                met["all"] += 1
                refused("damaged", take_up, fresh, reread=True)
        else:
            met["nothing"] += 1
            assert state(fresh) == want
    assert all(met[what] > 2 for what in ("a page", "a value", "all", "nothing")), met


def sql(statement: str) -> Callable[[Path], None]:
    def run(path: Path) -> None:
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.executescript(statement)

    return run


def facts(change: Callable[[Any], object], table: str = "chat") -> Callable[[Path], None]:
    return lambda path: edit_facts(path, table, change)


def values(at: int, value: object, table: str = "turn") -> Callable[[Path], None]:
    return lambda path: edit(path, table, lambda row: row.__setitem__(at, value))


HUGE = json.dumps([[]] * 6_000_000)
EDITS: list[tuple[Callable[[Path], None], str]] = [
    (sql("CREATE VIEW v AS SELECT 1"), "its tables are not"),
    (sql("CREATE TRIGGER t AFTER INSERT ON chat BEGIN DELETE FROM turn; END"), "its tables"),
    (sql("CREATE INDEX i ON turn (hex(zeroblob(9)))"), "its tables"),
    (sql("DROP TABLE turn; CREATE VIEW turn AS SELECT * FROM document"), "its tables"),
    (sql("PRAGMA user_version = 3"), "format 3, not 2"),
    (sql("DELETE FROM turn WHERE number = 1"), "turns or documents are missing"),
    (sql("DELETE FROM turn WHERE number = 0"), "checksum in table turn"),
    (sql("DELETE FROM document WHERE number = 2"), "turns or documents are missing"),
    (sql("DELETE FROM chat"), "damaged"),
    (sql("UPDATE document SET text = 'another'"), "checksum in table document"),
    (sql("UPDATE turn SET number = 9e18 WHERE number = 1"), "checksum in table turn"),
    (sql("UPDATE turn SET question = CAST('secret' || x'ff' AS TEXT) WHERE number = 1"), "decode"),
    (values(1, b"bytes"), "checksum in table turn"),
    (values(1, None), "checksum in table turn"),
    (values(0, "[" * 100_000), "damaged"),
    (values(0, HUGE), "lists and objects"),
    (values(0, HUGE, "chat"), "lists and objects"),
    (values(1, b"123", "chat"), "damaged"),
    (facts(lambda f: f["identity"].update(budget="12 parsecs")), "is not a budget"),
    (facts(lambda f: f["identity"].update(budget="1e99999999999 rows")), "is not a budget"),
    (facts(lambda f: f["identity"].update(budget="0 rows")), "is not a budget"),
    (facts(lambda f: f.update(curve=[[1]])), "damaged"),
    (facts(lambda f: f.update(seed="x")), "damaged"),
    (facts(lambda f: f.update(pending=[7])), "damaged"),
    (facts(lambda f: f.update(reuse="never")), "reuse 'never' is invalid"),
    (facts(lambda f: f.pop("no_cache")), "no 'no_cache'"),
    (facts(lambda f: f.update(name="a\n\nb"), "document"), "is not a name of a document"),
    (facts(lambda f: f.update(documents=[7]), "turn"), "damaged"),
    (facts(lambda f: f["record"].pop("tokens"), "turn"), "no key record.tokens"),
    (facts(lambda f: f["record"].update(extra=1), "turn"), "extra"),
]


@pytest.mark.parametrize(("change", "said"), EDITS, ids=[said for _, said in EDITS])
def test_what_no_chat_has_is_refused(home: Path, change: Callable[[Path], None], said: str) -> None:
    session = talked()
    for name in ("good", "one"):
        saved(session, name).close()
    change(home / "one" / "chat.db")
    fresh = chat()
    before = state(fresh)
    error = refused("chat one is damaged: ", take_up, fresh, reread=True)
    assert said in str(error)
    assert "secret" not in str(error)
    assert str(error).isprintable()
    assert state(fresh) == before
    assert {entry.name for entry in listing() if not entry.damaged} >= {"good"}


def test_a_strange_header_harms_no_other_chat(home: Path) -> None:
    saved(talked(), "good").close()
    saved(talked(), "bad").close()
    path = home / "bad" / "chat.db"
    whole = path.read_bytes()
    edit_facts(path, "chat", lambda f: f["run"].pop("model"))
    refused("damaged: it does not say how it was run", resumed, Settings(), "bad", ())
    for key in ("turns", "title", "identity", "documents", "run", "cache"):
        for value in (float("inf"), -1, 10**4000, [], {}, None, "x\n\ny" + "z" * 999):
            path.write_bytes(whole)
            edit_facts(path, "chat", lambda f, k=key, v=value: f.__setitem__(k, v))  # type: ignore[misc]
            found = {entry.name: entry for entry in listing()}
            assert not found["good"].damaged
            assert "\n" not in found["bad"].title
            assert len(found["bad"].title) <= 200
            assert newest() in ("good", "bad")
            try:
                take_up(chat(), "bad")
            except UsageError as error:
                assert "\n" not in str(error)  # noqa: PT017


def killed_while_saving(name: str) -> None:
    """Leave a journal in a chat's folder as a crash does."""
    if not (killed := os.fork()):
        db = sqlite3.connect(chats_folder() / name / "chat.db", isolation_level=None)
        db.execute("PRAGMA cache_size = 1")
        db.execute("BEGIN IMMEDIATE")
        db.execute("UPDATE document SET text = zeroblob(300000)")
        db.execute("UPDATE cache SET data = zeroblob(length(data))")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(killed, 0)


def test_a_journal_that_names_a_file_does_not_delete_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(talked()).close()
    (home / "precious").write_text("precious")
    name, journal = str(home / "precious").encode(), home / "one" / "chat.db-journal"
    killed_while_saving("one")
    data = journal.read_bytes()
    shutil.copytree(home / "one", home / "two")
    data += bytes(-len(data) % 512) + (0x40000000 // 4096 + 1).to_bytes(4) + name
    data += len(name).to_bytes(4) + sum(name).to_bytes(4) + bytes.fromhex("d9d505f920a163d7")
    journal.write_bytes(data)
    refused("its journal names another file", take_up, chat())
    assert listing()[0].name in ("one", "two")
    assert (home / "precious").read_text() == "precious"
    take_up(chat(), "two")  # the same journal without the name is rolled back
    # SQLite would roll a killed save back in the file that the next `ask` put in its place. The old
    # file is whole until then.
    old, session, fresh = talked(), talked(), chat()
    keeper().keep_ask(old)
    killed_while_saving("last-ask")
    say(session, "And?")
    for fails, kept in ((True, old), (False, session)):
        with monkeypatch.context() as full:
            if fails:
                full.setattr(os, "replace", failing(OSError(errno.EIO, "I/O")))
            keeper().keep_ask(session)
        one = keeper(asks=True)
        one.load(fresh, "last-ask")
        one.close()
        assert state(fresh) == state(kept)
        if fails:
            killed_while_saving("last-ask")


@pytest.mark.parametrize(
    ("part", "how"),
    [
        *product(("column.k", "column.pos", "column.sum"), ("shorter", "gone", "other kind")),
        ("tokens", "shorter"),
        ("length", "other"),
    ],
)
def test_a_cache_that_does_not_fit_the_chat_is_refused(home: Path, part: str, how: str) -> None:
    """With checksums that fit, as an edit by a program would leave it. The rest is not lost."""
    saved(talked()).close()
    path, size = home / "one" / "chat.db", 1

    def change(row: list[Any]) -> None:
        nonlocal size
        length = int.from_bytes(row[0][:8], "little")
        tensors, about = load(row[0]), json.loads(row[0][8 : 8 + length])["__metadata__"]
        tensor = tensors.pop(part)
        if how != "gone":
            tensors[part] = tensor[1:].clone() if how == "shorter" else tensor.to(torch.float16)
        row[0] = save(tensors, about)
        size = len(row[0])

    if part == "tokens":
        edit(path, "chat", lambda row: row.__setitem__(1, row[1][:-4]))
    else:
        if part != "length":
            edit(path, "cache", change)
        edit_facts(path, "chat", lambda facts: facts.update(cache=size))
    fresh = chat()
    refused(r"damaged|another version", take_up, fresh)
    assert fresh.fed == []
    take_up(fresh, reread=True)
    assert len(fresh.turns) == 2


@pytest.mark.parametrize(
    ("owner", "name", "then", "said"),
    [
        (RoCo, "total", "sum", "of another version of minikv: adakv with roco"),
        (transcript, "CACHE_BYTES", 100, r"has no cache: it held .* and at most 100 B are saved"),
    ],
)
def test_a_cache_that_cannot_be_used_is_no_damage(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, then: object, said: str
) -> None:
    """Another version stored other figures per token, or it was too large to save."""
    session = talked(decode="roco")
    with monkeypatch.context() as earlier:
        earlier.setattr(owner, name, then)
        if owner is RoCo:
            session = talked(decode="roco")
        saved(session).close()
    fresh = chat()
    assert "--reread" in refused(said, take_up, fresh).hint
    take_up(fresh, reread=True)
    assert (fresh.messages, fresh.curve) == (session.messages, session.curve)
    say(fresh, "And now?")
    assert fresh.reports[-1].tokens.prompt_reused == 0


# -- saves that fail ----------------------------------------------------------------------
@pytest.mark.parametrize("error", [MemoryError, type("PanicException", (BaseException,), {})])
def test_memory_that_is_short_for_a_save_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: type[BaseException]
) -> None:
    """The library of safetensors raises what is no Exception; Ctrl-C is none of it."""
    monkeypatch.setattr(safetensors.torch, "save", failing(error()))
    session, one = talked(), keeper()
    one.keep(session)
    assert "this chat is not saved: out of memory" in capsys.readouterr().err
    refused("cannot be saved: out of memory", one.save, session)
    monkeypatch.setattr(safetensors.torch, "save", failing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        one.keep(session)


def test_a_save_that_fails_warns_once(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session, one = talked(), keeper()
    with before(lambda: errno.ENOSPC, "pwrite64"):
        refused("disk is full", one.save, session, "x")
        assert (os.listdir(home), one.name) == ([], None)
    one.keep(session)
    assert one.name is not None
    first = read(one.name)
    with before(lambda: errno.ENOSPC, "pwrite64"):
        for i in range(3):
            say(session, f"question {i}")
            one.keep(session)
        refused("disk is full", one.save, session)
    assert capsys.readouterr().err.count("database or disk is full") == 1
    assert read(one.name) == first
    one.keep(session)
    assert len(read(one.name).turns) == 5


@pytest.mark.parametrize("calls", [("pread64",), WRITES])
def test_an_error_of_the_disk_is_not_another_process(calls: tuple[str, ...]) -> None:
    """After one of a load or a save, the chat is saved as before."""
    session = talked(policy="full")
    one = saved(session)
    for at in (1, 2, 5, 9):
        say(session, "more")
        faults = itertools.chain([0] * (at - 1), itertools.repeat(errno.EIO))
        with before(faults.__next__, *calls), contextlib.suppress(UsageError):
            one.save(session)
            one.load(session, "one")
        one.save(session)
        assert read("one").turns == tuple(session.turns)


def test_a_save_whose_end_goes_wrong_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file cannot be opened after it, or a network reports an error of a replacement that was
    made; the next save is no other minikv's."""
    session = talked()
    one = saved(session)
    say(session, "more")
    real = database._connected
    cannot = sqlite3.OperationalError("unable to open database file")
    with monkeypatch.context() as short:  # of file handles
        short.setattr(
            database,
            "_connected",
            lambda path, how: failing(cannot)() if how.startswith("ro") else real(path, how),
        )
        refused("unable to open", one.save, session)
    assert len(one.load(session, "one").turns) == 3
    say(session, "and more")
    one.save(session)
    assert read("one").turns == tuple(session.turns)
    replaced = os.replace

    def late(*given: Any) -> None:
        replaced(*given)
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))

    monkeypatch.setattr(os, "replace", late)
    for count in (5, 6):
        say(session, "more")
        one.save(session)
        assert len(read("one").turns) == count


@pytest.mark.parametrize("begun", ["opening", "saving", "creating"])
@pytest.mark.parametrize(
    "fatal", [errno.ENOSPC, signal.SIGKILL, pytest.param(errno.EIO, marks=pytest.mark.soak)]
)
def test_every_system_call_may_be_the_last(
    home: Path, begun: str, fatal: int, monkeypatch: pytest.MonkeyPatch, part: float
) -> None:
    """The call fails, and all after it, or the process is killed before it. The chat on disk is the
    old one or the new one, whole. By day every third call."""
    monkeypatch.setattr(stopping, "refuse_fork", lambda: None)  # nothing is computed there
    one, whole, session = home / "one", home / "whole", talked()
    act, turns = partial[Any](saved, session), {0, 2}
    if begun == "opening":  # a chat of an earlier version
        shutil.copytree(OLD, one)
        act, turns = partial(lambda: held("one").close()), {2}
    elif begun == "saving":  # a third turn
        mine = saved(session)
        say(session, "three")
        mine.close()
        act, turns = partial(mine.save, session), {2, 3}
    if one.exists():
        shutil.copytree(one, whole)
    for at in range(1 + (fatal == errno.ENOSPC), 200, 1 if part == 1 else 3):
        shutil.rmtree(one, ignore_errors=True)
        if whole.exists():
            shutil.copytree(whole, one)
        if not (child := os.fork()):
            os._exit(_acted(act, at, fatal))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 1, -signal.SIGKILL), at
        found = 0
        if (one / "chat.db").exists() or (one / "chat.jsonl").exists():
            take_up(chat(), reread=True)
            found = len(read("one").turns)
            assert set(os.listdir(one)) <= {"chat.db", "chat.db.new", "lock"}
        assert found in turns
        if code == 0:
            break
    assert found == max(turns)
    assert at > 10


def _acted(act: Callable[[], object], at: int, fatal: int) -> int:
    """Exit code of a process that acts, while its system calls fail from number `at` on."""
    calls = 0

    def hit() -> int:
        nonlocal calls
        calls += 1
        if calls < at:
            return 0
        if fatal == signal.SIGKILL:
            os.kill(os.getpid(), signal.SIGKILL)
        return fatal

    def faulty(real: Callable[..., None]) -> Callable[..., None]:
        def call(*given: Any, **named: Any) -> None:
            if number := hit():
                raise OSError(number, os.strerror(number))
            real(*given, **named)

        return call

    os.unlink, os.replace = faulty(os.unlink), faulty(os.replace)
    with before(hit, *WRITES):
        try:
            act()
        except UsageError:
            return 1
        except BaseException:
            return 7
    return 0 if calls < at else 1


def test_a_save_writes_what_changed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The records of earlier turns are not made again: in a chat of 10,000 turns, that took seconds
    after each answer. What was taken back is not left in the file."""
    session = talked()
    one = saved(session)
    made: list[object] = []
    real = TurnReport.to_dict
    monkeypatch.setattr(TurnReport, "to_dict", lambda self: made.append(self) or real(self))
    for undone, count in ((0, 1), (2, 2)):
        if undone:
            session.undo(undone)
        say(session, f"after {undone}")
        one.keep(session)
        assert len(made) == count
        assert read("one").turns == tuple(session.turns)
    say(session, "hidden " * 100)
    session.attach("secret " * 4000, "s.txt")
    one.save(session)
    path = home / "one" / "chat.db"
    assert all(word in path.read_bytes() for word in (b"secret", b"hidden"))
    session.undo()
    session.pending.clear()
    one.save(session)
    assert not any(word in path.read_bytes() for word in (b"secret", b"hidden"))


def test_a_chat_that_can_only_be_read_is_opened(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = talked()
    saved(session).close()
    one, fresh = keeper(), chat()
    with before(lambda: errno.EROFS, *WRITES):
        one.load(fresh, "one")
        assert state(fresh) == state(session)
        say(fresh, "more")
        one.keep(fresh)
    assert "this chat is not saved: " in capsys.readouterr().err
    one.close()
    # What cannot be saved costs one warning.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINIKV_HOME", str(tmp_path / "file"))
    session, one = talked(), keeper()
    for _ in range(2):
        one.keep(session)
        say(session, "more")
    assert capsys.readouterr().err.count("this chat is not saved: ") == 1
    refused("cannot be saved", one.save, session, "x")


# -- settings and processes ---------------------------------------------------------------
def test_settings_of_a_saved_chat_build_it_again(tmp_path: Path) -> None:
    """The last ask is refused to another model, with what to do."""
    session = talked(facts=model(tmp_path), pin_system=True)
    saved(session)
    keeper(asks=True).keep_ask(session)
    settings = resumed(Settings(), "one", ())
    assert settings.model == str(tmp_path / "a")
    assert (settings.system, settings.seed, settings.pin_system) == ("be brief", 4, True)
    assert (settings.dtype, settings.policy) == ("float32", "full")
    stated = Settings(model="x/y", seed=1, policy="snapkv", budget="64")
    settings = resumed(stated, "one", {"model", "seed", "policy", "budget"})
    assert (settings.model, settings.revision, settings.seed) == ("x/y", None, 1)
    assert (settings.policy, settings.budget) == ("snapkv", "64")
    other = chat(facts=model(tmp_path, weights=b"others"))
    says = "the last ask does not belong to this run"
    assert "without -c" in refused(says, take_up, other, database.LAST).hint


def test_thoughts_are_saved_and_left_out_of_the_next_turn() -> None:
    first, second = chat("full"), chat("full")
    for session in (first, second):
        session.template = ThinkML(ByteTokenizer())
    list(first.ask("Who?", 30, 0.7, max_thoughts=9))
    saved(first).close()
    assert take_up(second).turns == tuple(first.turns)
    assert second.turns[0].thoughts
    for session in (first, second):
        list(session.ask("Why?", 30, 0.7, max_thoughts=9))
    assert second.turns[1].answer == first.turns[1].answer
    assert second.fed == first.fed


# -- chats of earlier versions ------------------------------------------------------------------
def test_an_earlier_chat_is_written_anew(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is refused stays as it is."""
    saved(talked()).close()
    monkeypatch.setattr(minikv, "__version__", "9.9")
    refused(r"minikv 9\.9 here, 0\.\d+\.\d+ there", take_up, chat())
    shutil.rmtree(home / "one")
    shutil.copytree(OLD, home / "one")
    files = sorted(os.listdir(home / "one"))
    refused("does not belong to this run", take_up, chat(budget=40))
    assert sorted(os.listdir(home / "one")) == files
    take_up(chat(budget=40), reread=True)
    assert sorted(os.listdir(home / "one")) == ["chat.db", "lock"]
    shutil.rmtree(home / "one")
    monkeypatch.setattr(minikv, "__version__", "0.1.0")
    shutil.copytree(OLD, home / "one")
    os.utime(home / "one" / "chat.jsonl", (1000, 1000))
    facts = json.loads((OLD / "chat.jsonl").read_text().split("\n")[0])
    (entry,) = listing()
    told = (entry.name, entry.turns, entry.documents, entry.title)
    assert told == ("one", 2, 3, "Who owns the mill?")
    assert len(read("one").turns) == 2
    assert sorted(os.listdir(home / "one")) == files  # only an open chat is written anew
    session = chat(budget=40)
    found = take_up(session)
    assert sorted(os.listdir(home / "one")) == ["chat.db", "lock"]
    assert stat.S_IMODE((home / "one" / "chat.db").stat().st_mode) == 0o600
    (now,) = listing()
    # Of the same time: `--resume` takes the newest.
    assert replace(now, nbytes=entry.nbytes) == entry
    assert questions(found) == ["Who owns\nthe mill?", "Why?"]
    texts = [document.text for document in (*found.documents, *found.pending)]
    assert texts == ["A mill stands by the river.", "no name, and an é", "waiting"]
    assert (len(session.fed), session.system, session.seed) == (124, "be brief", 4)
    assert [list(point) for point in session.curve] == facts["curve"]
    say(session, "And now?")
    assert session.reports[-1].tokens.prompt_reused == 124
