"""A budget as the user writes it, and the only place where it becomes a number of rows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from minikv.checks import quoted
from minikv.errors import UsageError

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
}


@dataclass(frozen=True, slots=True)
class Budget:
    """`value` in `unit`: "rows" (the mean per KV head and layer), "share" (of all tokens read when
    the first prompt under this budget ends), "bytes" (of all layers and heads together) or "auto".

    Rows are counted right after eviction, sinks and observation window included. "auto" is decided
    for each prompt (see `minikv.chat.fitting`): `value` is 0 while everything stays, then rows.
    """

    unit: str
    value: Fraction

    @staticmethod
    def parse(text: str | int) -> Budget:
        """Parse "512", "20%", "64MiB" or "auto". Raises UsageError for anything else."""
        raw = str(text).strip()
        if raw.lower() == "auto":
            return AUTO
        found = re.fullmatch(r"(\d{1,30}(?:\.\d{1,18})?)\s*(%|[A-Za-z]*)", raw)
        if found:
            number, unit = Fraction(found[1]), found[2].lower()
            if unit == "%" and 0 < number <= 100:
                return Budget("share", number / 100)
            if unit == "" and number.denominator == 1 and "." not in found[1] and number > 0:
                return Budget("rows", number)
            if unit and unit in _UNITS and number > 0:
                return Budget("bytes", number * _UNITS[unit])
        raise UsageError(
            f"the budget cannot be {quoted(raw)}",
            "give tokens per head, 1 or more (512), a share of the prompt, up to 100% (20%), bytes "
            "(64MiB) or auto",
        )

    def rows(self, prompt: int, row_bytes: int, heads: int) -> int:
        """The budget in rows per head, at least 1, when `prompt` tokens have been read.

        row_bytes: bytes of one row of one KV head, policy columns included. heads: L x H.
        """
        if self.unit in ("rows", "auto"):
            return int(self.value)
        if self.unit == "share":
            return max(1, round(self.value * prompt))
        return max(1, int(self.value / (row_bytes * heads)))

    @staticmethod
    def size(text: str) -> int | None:
        """Bytes of a size such as "20GiB"; None if the text is not a size."""
        try:
            found = Budget.parse(text)
        except UsageError:
            return None
        return int(found.value) if found.unit == "bytes" else None

    @property
    def everything(self) -> bool:
        """Whether "auto" has decided that nothing must be evicted."""
        return self.unit == "auto" and not self.value

    def __str__(self) -> str:
        if self.unit == "auto":
            return "auto"
        if self.unit == "rows":
            return str(self.value)
        if self.unit == "share":
            return f"{float(self.value * 100):g}%"
        for unit in ("gib", "mib", "kib"):
            if self.value >= _UNITS[unit]:
                return f"{float(self.value / _UNITS[unit]):g}{unit[0].upper()}iB"
        return f"{float(self.value):g}B"


AUTO = Budget("auto", Fraction(0))
"""Not decided yet, or everything stays."""
