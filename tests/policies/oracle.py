"""The arithmetic of `minikv.policies.selection` and of the parts, in plain Python: slow and short.

Rows are numbers of a head's rows, heads are lists. A higher score stays; of equal scores the
younger row, then the first head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

Rows = Sequence[float]


def best(scores: Rows, pos: Rows, free: Iterable[int], count: int) -> set[int]:
    """The `count` best of the free rows."""
    return set(sorted(free, key=lambda i: (-scores[i], -pos[i]))[: max(0, count)])


def wanted(scores: list[Rows], pos: list[Rows], free: list[list[int]], total: int) -> list[int]:
    """How many of the layer's `total` best free rows each head holds."""
    rows = [(h, i) for h, mine in enumerate(free) for i in mine]
    rows.sort(key=lambda row: (-scores[row[0]][row[1]], -pos[row[0]][row[1]], row[0]))
    held = Counter(h for h, _ in rows[: max(0, total)])
    return [held[h] for h in range(len(free))]


def share(wish: Sequence[Fraction], most: Sequence[int], total: int) -> list[int]:
    """Whole numbers near `wish`, each <= most, which sum to min(total, sum(most)): what exceeds a
    `most` is divided evenly among the others, then the largest remainders are rounded up."""
    total = min(total, sum(most))
    x = [min(w, Fraction(m)) for w, m in zip(wish, most, strict=True)]
    while (spare := total - sum(x)) > 0:
        open_ = [i for i, m in enumerate(most) if x[i] < m]
        for i in open_:
            x[i] = min(x[i] + Fraction(spare) / len(open_), Fraction(most[i]))
    counts = [int(w) for w in x]
    order = sorted(range(len(x)), key=lambda i: (counts[i] - x[i], i))
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


def fill(used: Sequence[int], total: int) -> list[int]:
    """Raise the lowest, the first of them, by one until the sum is `total`."""
    caps = list(used)
    while sum(caps) < total:
        caps[caps.index(min(caps))] += 1
    return caps


def ensure_least(
    counts: Sequence[int], sure: Sequence[int], free: Sequence[int], least: int
) -> list[int]:
    """A head below `least` is given a row by the richest head that can spare one, as often as it
    takes."""
    given = list(counts)
    for h in range(len(given)):
        while given[h] + sure[h] < least and given[h] < free[h]:
            rich = [i for i, n in enumerate(given) if n and n + sure[i] > least]
            if not rich:
                return given
            given[max(rich, key=lambda i: given[i] + sure[i])] -= 1
            given[h] += 1
    return given


def ranked(scores: Rows, pos: Rows, free: list[int]) -> dict[int, Fraction]:
    """The share of the free rows that each is at least as good as."""
    order = sorted(free, key=lambda i: (scores[i], pos[i]))
    return {i: Fraction(n + 1, len(free)) for n, i in enumerate(order)}


def adaptive(
    need: Sequence[int], most: Sequence[int], total: int, alpha: Fraction, rounding: str
) -> list[int]:
    """Ada-KV: (1 - alpha) x need + alpha x even share."""
    each = total // len(need)
    if rounding == "official":
        return [
            min(round(n * float(1 - alpha) + int(each * float(alpha))), m)
            for n, m in zip(need, most, strict=True)
        ]
    return share([(1 - alpha) * n + alpha * Fraction(total, len(need)) for n in need], most, total)


def floored(
    scores: list[Rows],
    pos: list[Rows],
    free: list[list[int]],
    total: int,
    alpha: float,
    window: int,
) -> list[int]:
    """kvpress: alpha of its even share is a head's own, the rest goes to the layer's best rows."""
    own = max(0, int((total // len(free) + window) * alpha) - window)
    sure = [best(s, p, f, own) for s, p, f in zip(scores, pos, free, strict=True)]
    rest = [[i for i in f if i not in mine] for f, mine in zip(free, sure, strict=True)]
    more = wanted(scores, pos, rest, total - sum(map(len, sure)))
    return [len(mine) + n for mine, n in zip(sure, more, strict=True)]


Choose = Callable[[int, Rows, list[int], int], set[int]]
"""(head, scores, free rows, count) -> the rows chosen."""


def draw(pos: list[Rows], keys: Callable[[int, Rows, list[int]], Rows], random: float) -> Choose:
    """NaCl: the share `random` of the rows is drawn, which is to say the best by `keys`."""

    def choose(head: int, scores: Rows, free: list[int], count: int) -> set[int]:
        drawn = int(random * count)
        sure = best(scores, pos[head], free, count - drawn)
        rest = [i for i in free if i not in sure]
        return sure | best(keys(head, scores, free), pos[head], rest, drawn)

    return choose


def ranks(rows: int, count: int, how: str) -> list[int]:
    """Which of `rows` sorted candidates stand for all."""
    if how == "step":
        return [i * (rows // count) for i in range(count)]
    return [round(i * (rows - 1) / (count - 1)) if count > 1 else 0 for i in range(count)]


def distances(
    worths: list[list[Rows]],
    pos: list[Rows],
    free: list[list[int]],
    goal: Callable[[list[bool]], list[bool]],
) -> dict[float, int]:
    """KVCrush: position -> Hamming distance of its bits to the anchor. worths[h][g]: by what the
    bits are decided; goal: the anchor, from what most positions have."""
    places = sorted({pos[h][i] for h, rows in enumerate(free) for i in rows})
    bits = []
    for h, rows in enumerate(free):
        for worth in worths[h]:
            half = {pos[h][i] for i in best(worth, pos[h], rows, len(rows) // 2)}
            bits.append([place in half for place in places])
    anchor = goal([2 * sum(line) > len(places) for line in bits])
    return {
        place: sum(line[n] != want for line, want in zip(bits, anchor, strict=True))
        for n, place in enumerate(places)
    }


def crush(pos: list[Rows], distance: dict[float, int], ratio: float, how: str) -> Choose:
    """KVCrush: the share `ratio` goes to representatives of the rows that would leave."""

    def choose(head: int, scores: Rows, free: list[int], count: int) -> set[int]:
        extra = min(round(ratio * count), count)
        sure = best(scores, pos[head], free, count - extra)
        rest = [i for i in free if i not in sure]
        rest.sort(key=lambda i: (distance[pos[head][i]], pos[head][i]))
        if len(rest) <= extra:
            return sure | set(rest)
        return sure | {rest[n] for n in ranks(len(rest), extra, how)}

    return choose
