"""The record of a turn is true, and made before the caller hears of it; warnings come before."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import small_chat
from fakes import FakeEngine
from refusals import failing
from small_chat import reported
from test_session import make


def test_a_turn_is_closed_before_the_caller_hears_of_it() -> None:
    """A notice that comes during the answer, and a caller that fails on it."""
    session = make()
    session.engine.notices = []

    answer = session.ask("who?", max_tokens=3, notice=failing(BrokenPipeError()))
    next(answer)
    session.engine.notices.append("steps are slower now")
    with pytest.raises(BrokenPipeError):
        list(answer)
    assert session.turn == len(session.turns) == 1
    assert session.turns[0].report.warnings == ("steps are slower now",)
    session.snapshot()
    assert "".join(session.ask("and then?", max_tokens=3))


def test_a_turn_has_its_two_points_of_the_curve_without_memory_to_count_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chat = small_chat.chat()
    list(chat.ask("one", 3))
    stats, before = chat.engine.kv.stats, len(chat.fed)

    def full() -> Any:
        if len(chat.fed) > before:
            raise MemoryError
        return stats()

    with monkeypatch.context() as patch:
        patch.setattr(chat.engine.kv, "stats", full)
        list(chat.ask("two", 3))
    assert len(chat.curve) == 4
    assert [seen for seen, *_ in chat.curve] == sorted(seen for seen, *_ in chat.curve)


_CHAT = """
import json, sys
from pathlib import Path
import minikv
from minikv.models import BUNDLED
from minikv.pages import give_back

def resident():
    give_back()
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}
    return 1024 * (sizes["RssAnon"] + sizes["RssShmem"])

text = (BUNDLED / "sample.txt").read_text()
found = {}
for name in sys.argv[1:]:
    policy, tier = name.split()
    chat = minikv.load(policy=policy, budget=256, tier=tier, threads=1)
    list(chat.ask("Who?", 4))
    chat.reset()
    before = resident()
    chat.attach((text * 2)[:36_600])
    list(chat.ask("Who leads Project Misty Clover?", 8))
    found[name] = resident() - before, chat.report.to_dict()
    chat.close()
    del chat
print(json.dumps(found))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_the_memory_of_the_process_is_that_of_the_report() -> None:
    """8,000 tokens under each --tier and without eviction, beside a chat that holds almost nothing:
    the process holds more by what the report says, within 5 % of a full cache."""
    # The first chat of a process also makes what all later ones use.
    names = ("adakv none", "adakv none", "adakv file", "adakv ram", "full none")
    run = subprocess.run(
        [sys.executable, "-c", _CHAT, *names], capture_output=True, text=True, check=True
    )
    found: dict[str, tuple[int, dict[str, Any]]] = {}
    for name, (resident, record) in json.loads(run.stdout).items():
        assert 7_900 < record["tokens"]["seen_total"] < 8_192
        found[name] = resident, record["kv_bytes"]
    base, said = found.pop("adakv none")
    for name, (resident, kv) in found.items():
        taken = kv["allocated"] + kv["tier_here"] - said["allocated"]
        assert resident - base == pytest.approx(taken, abs=0.05 * kv["full"]), name
    assert found["adakv file"][1]["tier"] > 0 == found["adakv file"][1]["tier_here"]
    ram, full = found["adakv ram"][1], found["full none"][1]
    assert ram["tier_here"] == ram["tier"] > 0.98 * full["full"]
    assert ram["peak_prefill"] > ram["tier"], "what existed while reading counts the tier"


def test_a_program_may_end_within_an_answer() -> None:
    program = """
import sys, minikv
chat = minikv.load()
answer = chat.ask("Who leads Project Misty Clover?", 50)
print(next(answer))
sys.exit(3)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (3, "")
    assert run.stdout.strip()


def test_warnings_come_before_the_answer_and_stay_in_the_record() -> None:
    engine = FakeEngine()
    chat = make(engine=engine, notes=("no chat template: plain completion",))
    chat.attach("a <end> b <end>", "d.txt")
    order: list[str] = []
    for piece in chat.ask("q <end>", notice=order.append):
        order.append(f"piece {piece}")
    warnings = reported(chat).warnings
    assert order[: len(warnings)] == list(warnings)
    assert warnings[0] == "no chat template: plain completion"
    assert warnings[1].startswith("2 strings in d.txt look like control tokens")
    assert warnings[2].startswith("1 string in the question looks like a control token")
    assert len(warnings) == 3
    engine.kv.shaped = True
    list(chat.ask("second"))
    assert reported(chat).shaped_by_turn == 2
    assert reported(chat).warnings == ()  # notes are said once, and no document was new
    list(chat.ask("third"))
    assert reported(chat).warnings == ()  # the line under the answer says it
    assert reported(chat).shaped_by_turn == reported(chat).misses == 2


CONTROL = """1 string in a.txt looks like a control token; it was read as plain text
1 string in the question may pass for turn markers, which are plain text for this model: it cannot \
tell them from real ones"""
CHANGED = """the model's tokenizer drops or changes 2 characters of a.txt
the model's tokenizer drops or changes 1 character of the question"""


@pytest.mark.parametrize(
    ("document", "question", "told"),
    [
        ("one <end> two", "what is [USER]?", CONTROL),
        ("one \u2620 two \u2620", "what is \u2620?", CHANGED),
    ],
)
def test_what_the_model_may_take_for_something_else_is_told(
    document: str, question: str, told: str
) -> None:
    chat, notes = make(), list[str]()
    chat.attach(document, name="a.txt")
    list(chat.ask(question, max_tokens=2, notice=notes.append))
    assert notes == told.splitlines()
