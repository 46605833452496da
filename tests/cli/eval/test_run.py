"""What is measured, and what is refused before anything is."""

from __future__ import annotations

from dataclasses import replace

import pytest

import minikv
from minikv.chat.eviction_config import EvictionConfig
from minikv.chat.session import ChatSession
from minikv.cli.eval import command, passes, tasks
from minikv.cli.eval.items import Item
from minikv.cli.eval.tasks import CHATS
from minikv.cli.measure import choices
from minikv.errors import ContextError, UsageError


def test_every_policy_with_every_decode_policy() -> None:
    wanted = choices("adakv,full,snapkv", "64,20%", "none,roco")
    assert [(c.policy, c.decode, str(c.budget)) for c in wanted[1:]] == [
        (p, d, b)
        for p, d in (
            ("adakv", "none"),
            ("adakv", "roco"),
            ("full", "roco"),
            ("snapkv", "none"),
            ("snapkv", "roco"),
        )
        for b in ("64", "20%")
    ]
    for plain in ("auto", "none"):
        assert len(choices("full", "64", plain)) == 1
    assert len(choices("full,roco", "64", "auto", 0, 32)) == 2
    strided = choices("roco,tova", "64", "auto", 0, 32)
    assert [(c.policy, c.decode, c.stride) for c in strided[1:]] == [
        ("roco", "roco", 32),
        ("tova", "tova", 32),
    ]
    with pytest.raises(UsageError, match=r"^roco has no option 'windov'"):
        EvictionConfig.read("roco", stride=32, options={"windov": 3})
    few = choices("snapkv,l2", "64", "none", 0, 0, {"window": "16"})
    assert few[1].policy_options["window"] == 16
    assert "window" not in few[2].policy_options


def test_bytes_too_few_are_refused_before_anything_is_measured() -> None:
    chat = minikv.load(policy="full")
    item = Item("word " * 90, ("What?",), (("word",),))
    few = EvictionConfig.read("adakv", budget="1KiB")
    one = command.Run(chat, ["facts"], [item], [*full(), few])
    with pytest.raises(UsageError, match="budget 1KiB, which is"):
        one.check()


def full() -> list[EvictionConfig]:
    return choices("full", "64", "auto")


def never(done: int, total: int) -> None:
    """Progress that nobody looks at."""


@pytest.mark.parametrize("task", ["facts", "ppl", "kl"])
def test_nothing_is_cut_to_fit(task: str) -> None:
    """An item that does not fit is an error with the documented code, not a cut document."""
    chat = minikv.load(policy="full")
    long = Item("word " * 9000, ("What?",), (("word",),), source="x.jsonl, line 7")
    fits = Item("word " * 90, ("What?",), (("word",),))
    one = command.Run(chat, [task], [fits, long], full())
    with pytest.raises(ContextError) as refused:
        one.check()
    assert str(refused.value).startswith("x.jsonl, line 7: needs ")
    assert "8,192 positions" in str(refused.value)
    if task != "ppl":  # where a long document takes long
        with pytest.raises(ContextError):
            one.measure(never)
        assert one.completed == 1
    unnamed = replace(long, source="")
    with pytest.raises(ContextError, match="mine, document 1: needs"):
        command.Run(chat, [task], [unnamed], full(), name="mine").check()


def test_every_answer_must_have_room() -> None:
    """The check counts what a chat feeds, at least, whatever its answers are."""
    chat = minikv.load(policy="full")
    item = Item(
        "The town of Velmora has a mayor.",
        ("Who?", "What is it?", "Where?"),
        (("a",),) * 3,
        max_tokens=8,
    )
    one = command.Run(chat, ["followup"], [item], full())
    lengths: list[int] = []
    reset = chat.reset
    chat.reset = lambda **_: (lengths.append(len(chat.fed)), reset())[1]  # type: ignore
    one.measure(never)
    chat.max_context = max(lengths) - 1
    with pytest.raises(ContextError) as refused:
        one.check()
    needed = int(str(refused.value).split("needs ")[1].split()[0])
    assert max(lengths) <= needed <= max(lengths) + 3 * 8
    chat.max_context = needed
    one.check()


CHAT = Item(
    "The mayor of Velmora is Ivo Kalman. " + "The road was dull and the carts moved slowly. " * 40,
    ("Who is the mayor of Velmora?", "Tell me the mayor of Velmora.", "Who is mayor in Velmora?"),
    (("Ivo Kalman",),) * 3,
)


def test_every_reuse_beside_the_full_cache() -> None:
    """Each finds what it says: by the chat's own records; and the chat is as it was afterwards."""
    chat = minikv.load(policy="full")
    wanted = [*full(), EvictionConfig.read("adakv", budget="48")]
    one = command.Run(chat, ["followup"], [CHAT, CHAT], wanted, command.REUSES)
    one.check()
    found: list[list[str]] = []
    answers = passes.answers

    def seen(session: ChatSession, item: Item, _: passes.Memory) -> list[str]:
        made = answers(session, item)
        found.append([report.reuse for report in session.reports])
        return made

    before = chat.reuse, chat.recall.kind
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(passes.PASSES, "answers", replace(passes.PASSES["answers"], run=seen))
        one.measure(never)
    assert found[:5] == found[5:]
    assert found[:5] == [
        ["once", "once", "once"],
        ["once", "once", "once"],
        ["once", "refresh", "refresh"],
        ["blind", "once", "once"],
        ["once", "recall", "recall"],
    ]
    cells = one.cells()
    assert [(c.policy, c.reuse) for c in cells] == [
        ("full", "once"),
        *(("adakv", reuse) for reuse in command.REUSES),
    ]
    by = {c.reuse: c for c in cells[1:]}
    assert by["recall"].answers == by["refresh"].answers
    assert by["recall"].by_group[0] == by["once"].by_group[0]
    assert (chat.reuse, chat.recall.kind) == before
    assert not chat.recall.nbytes


def test_a_tier_whose_prompt_was_read_for_another_policy_is_the_same() -> None:
    """A document that is computed once for all policies goes to each one's tier all the same: the
    answers are those of a chat that read it itself."""
    chat = minikv.load(policy="full")
    item = next(CHATS["followup"].items(chat.tokenizer, 600, 6, 5))
    wanted = [*full(), *(EvictionConfig.read("adakv", budget=b) for b in ("48", "128"))]
    one = command.Run(chat, ["followup"], [item], wanted, ["once", "recall"])
    one.measure(never)
    made = [cell.answers for cell in one.cells()]
    for number, budget in ((3, "48"), (4, "128")):
        alone = minikv.load(policy="adakv", budget=budget, reuse="recall", tier="ram")
        assert passes.answers(alone, item) == made[number][0]
    assert made[3] != made[1], "recall and once answer alike: the test sees nothing"


def test_without_questions_nothing_is_measured_twice() -> None:
    chat = minikv.load(policy="full")
    wanted = [*full(), EvictionConfig.read("adakv", budget="48")]
    one = command.Run(chat, ["facts", "ppl"], [CHAT], wanted, ["recall", "once"])
    one.measure(never)
    assert [(c.task, c.policy, c.reuse) for c in one.cells()] == [
        ("facts", "full", "once"),
        ("facts", "adakv", "recall"),
        ("facts", "adakv", "once"),
        ("ppl", "full", "once"),
        ("ppl", "adakv", "recall"),
    ]


def test_a_policy_that_cannot_recall_is_refused_before_anything_is_measured() -> None:
    chat = minikv.load(policy="full")
    strided = [*full(), EvictionConfig.read("roco", budget="64", stride=32)]
    with pytest.raises(UsageError, match="--reuse recall is not possible: with a stride"):
        command.Run(chat, ["followup"], [CHAT], strided, ["recall"]).check()
    command.Run(chat, ["followup"], [CHAT], strided, ["once"]).check()


@pytest.fixture(scope="module")
def about() -> Item:
    """A document of 1,000 tokens with three questions, each asked apart."""
    (item,) = tasks.facts(minikv.load(policy="full").tokenizer, 1000, 1, 77, questions=3)
    assert item.apart
    assert len(item.questions) == 3
    return item


def test_questions_that_are_asked_apart_are_each_the_first(about: Item) -> None:
    """Under each reuse, the answers are those of a chat of its own for each question."""
    chat = minikv.load(policy="full")
    seen = EvictionConfig.read("snapkv", budget="64")
    wanted = [*full(), seen]
    one = command.Run(chat, ["facts", "agree"], [about], wanted, ["once", "blind"])
    one.check()
    one.measure(never)
    made = [cell.answers for cell in one.cells()[:3]]
    for number, reuse in ((1, "once"), (2, "blind")):
        for question, answer in zip(about.questions, made[number][0], strict=True):
            chat.reset()
            chat.configure(seen)
            chat.reuse = reuse
            chat.attach(about.document, "report.txt")
            assert "".join(chat.ask(question, max_tokens=16)) == answer
    assert made[1] != made[2], "seen and unseen answer alike: the test sees nothing"
    cells = one.cells()
    assert [c.n for c in cells] == [3] * 6
    assert not any(c.by_group for c in cells)
    assert [len(row) for row in cells[0].scores] == [3]


@pytest.mark.parametrize(
    ("policy", "reuse"), [("snapkv", "once"), ("queryspan+global", "blind"), ("kvzip", "blind")]
)
def test_what_several_budgets_and_questions_share_is_as_if_each_had_been_alone(
    policy: str, reuse: str, about: Item
) -> None:
    """KL beside the full cache, also under policies that read twice, without `Rereading` and after
    answers to the same prompts."""
    chat = minikv.load(policy="full")
    some = replace(about, questions=about.questions[:2], right=about.right[:2])
    mine = [EvictionConfig.read(policy, budget=str(budget)) for budget in (48, 256)]
    memory: passes.Memory = {}
    alone = []
    for eviction in (*full(), *mine):
        chat.configure(eviction)
        chat.reuse = reuse if eviction.evicts else "once"
        alone.append(passes.PASSES["beside"].run(chat, some, memory))
    chat.reset()
    one = command.Run(chat, ["facts", "kl"], [some], [*full(), *mine], [reuse])
    one.measure(never)
    found = [cell.score for cell in one.cells() if cell.task == "kl"]
    flat = [[t[1] for answer in made for t in answer] for made in alone]
    assert found == [sum(values) / len(values) for values in flat]
    assert found[0] == 0.0 < found[2] <= found[1]
