"""The common parts of `minikv eval` and `minikv bench`: the compared policies, a line of progress,
and JSON that keeps the results of a stopped run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minikv.chat.eviction_config import EvictionConfig, stated
from minikv.cli.screen.progress import Live
from minikv.cli.screen.terminal import Terminal
from minikv.cli.settings.flags import read_count, read_list
from minikv.errors import UsageError

STDOUT = "-"
"""The value of --json without a file."""


def choices(
    policies: str,
    budgets: str,
    decodes: str,
    seed: int = 0,
    stride: int = 0,
    options: Mapping[str, object] | None = None,
) -> list[EvictionConfig]:
    """The full cache, then every policy with every decode policy and budget, from lists with
    commas.

    An option goes to each policy that has it. Raises UsageError, for example for an option that no
    policy has, for options that contradict each other, and for fewer tokens per head than the
    policies need.
    """
    given, known = dict(options or {}), set()
    wanted = [EvictionConfig.read("full", "none")]
    amounts, steps = read_list(budgets, "--budget"), read_list(decodes, "--decode")
    for policy in read_list(policies, "--policy"):
        for decode in steps:
            if policy == "full" and not EvictionConfig.read(policy, decode).may_evict:
                continue  # the first row
            plain = EvictionConfig.read(policy, decode, "512", {}, seed, stride)
            takes = {*plain.policy_options, *plain.decode_options}
            known |= takes
            mine = {name: value for name, value in given.items() if name in takes}
            wanted += [
                EvictionConfig.read(policy, decode, stated(budget), mine, seed, stride)
                for budget in amounts
            ]
    for name in given:
        if name not in known:
            raise UsageError(
                f"none of these policies has an option {name!r}",
                f"they take: {', '.join(sorted(known)) or 'no options'}",
            )
    for eviction in wanted:
        least = eviction.least_rows()  # also refuses contradictory options
        if eviction.evicts and eviction.budget.unit == "rows" and eviction.budget.value < least:
            raise UsageError(
                f"budget {eviction.budget} is too small for {eviction.pair}",
                f"the smallest useful budget is {least} tokens per head",
            )
    return wanted


def lengths(text: str) -> tuple[int, ...]:
    """The numbers of tokens of --length, in the order given. Raises UsageError."""
    flag = "--length"
    found = tuple(dict.fromkeys(read_count(one, flag) for one in read_list(text, flag)))
    for number in found:
        if not 64 <= number <= 1_000_000:
            raise UsageError(f"--length must be 64 to 1,000,000, got {number:,}")
    return found


class Results:
    """The `record` of a run, which becomes one JSON object in `target`: a file, `STDOUT` or None.
    Tables go to stdout, unless the object goes there."""

    def __init__(self, terminal: Terminal, target: str | None, record: Mapping[str, Any]) -> None:
        """Raises UsageError for a file that cannot be written."""
        if target not in (None, STDOUT) and Path(str(target)).is_dir():
            raise UsageError(f"{target} is a directory", "--json takes a file")
        if target is not None and not Path(target).absolute().parent.is_dir():
            raise UsageError(f"there is no directory {Path(target).parent}")
        self.terminal, self.target = terminal, target
        self.record: dict[str, Any] = {**record, "notes": []}
        self._live, self._whole = Live(terminal, "", "parts"), ""

    def progress(self, what: str, done: int, total: int) -> None:
        """Call before piece `done` of `total`; `what` begins with the name of the whole."""
        if self._whole != (whole := what.partition(":")[0]):
            self._whole = whole
            self._live.restart(what)
        self._live.label = what
        self._live(done, total)

    def note(self, text: str) -> None:
        """Show a line to the user, once."""
        if text not in self.record["notes"]:
            self.record["notes"].append(text)
            self.terminal.warn(text)

    def show(self, text: str) -> None:
        """Print a table."""
        self.terminal.clear_status()
        if self.target != STDOUT:
            self.terminal.data(text + "\n", fold=True)

    def write(self, *, last: bool = False) -> None:
        """Write the file, so that a run that is killed later loses nothing. last: this is the end,
        so stdout may get the object too. Raises UsageError."""
        if self.target == STDOUT:
            if last:
                self.terminal.data(json.dumps(self.record))
        elif self.target is not None:
            try:
                Path(self.target).write_text(json.dumps(self.record, indent=1) + "\n")
            except OSError as error:
                raise UsageError(f"cannot write {self.target}: {error.strerror}") from None
