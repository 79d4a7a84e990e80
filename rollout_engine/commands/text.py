"""Numbers as a person reads them. Nothing here is meant for machines: they have --json."""

from __future__ import annotations

import math
from collections.abc import Mapping

MISSING = "–"
"""What stands where there is no value: never 0."""
_DRAWN = {
    **{code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}
_UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def whole(number: int) -> str:
    """1319 -> `1,319`."""
    return f"{number:,}"


def short(number: float) -> str:
    """1319000 -> `1.32M`; three digits are enough for a rate or a number of tokens."""
    for size, unit in _UNITS:
        # 999,999 would be "1e+03k"
        if abs(number) >= size * 0.9995:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}" if number == int(number) else f"{number:.3g}"


def size(number: float) -> str:
    """Bytes in binary units: `21.6 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(number) < 1024 or unit == "TiB":
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError


def clock(seconds: float | None) -> str:
    """A duration that one waits for: `1:04`, `2:03:09`, `3 d 04 h`."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    whole_s = max(round(seconds), 0)
    if whole_s >= 86_400:
        return f"{whole_s // 86_400} d {whole_s % 86_400 // 3600:02} h"
    minutes, rest = divmod(whole_s, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def took(seconds: float | None) -> str:
    """A duration that was measured: `3 ms`, `1.24 s`, `2:03`."""
    if seconds is None:
        return MISSING
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.3g} s" if seconds < 59.5 else clock(seconds)


def money(usd: float | None) -> str:
    """US dollars, with enough digits for small sums."""
    if usd is None:
        return MISSING
    return f"${usd:,.2f}" if usd >= 1 or usd == 0 else f"${usd:.2g}" if usd < 0.01 else f"${usd:.3f}"


def score(value: float | None, digits: int = 3) -> str:
    """A score or a figure made of scores; MISSING where there is none."""
    if value is None or not math.isfinite(value):
        return MISSING
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def part(count: int, of: int) -> str:
    """`191/192`."""
    return f"{count:,}/{of:,}"


def percent(value: float | None) -> str:
    """0.9947 -> `99.5 %`; nothing but all of it is `100 %`."""
    if value is None:
        return MISSING
    rounded = min(round(value * 100, 1), 99.9) if value < 1 else 100.0
    return f"{rounded:g} %"


def plural(count: int, noun: str) -> str:
    """`1 task`, `12 tasks`, `2 retries`."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun[:-1]}ies" if noun.endswith("y") else f"{count:,} {noun}s"


def kinds(counts: Mapping[str, int], most: int = 3) -> str:
    """The most frequent kinds with their counts: `model:ModelTimeout 12, and 3 other kinds`."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{kind} {count:,}" for kind, count in ordered[:most])
    rest = len(ordered) - most
    return f"{shown}, and {rest} other kind{'s' if rest > 1 else ''}" if rest > 0 else shown


def safe(text: str) -> str:
    """Text of a model or a task for a terminal: control characters are drawn (`␛`), so that none is obeyed."""
    return text.translate(_DRAWN)


def clip(text: str, limit: int) -> str:
    """At most `limit` characters, with a word on how many are left out."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}… [{len(text) - limit:,} more characters; --full shows them]"


def one_line(text: str, limit: int) -> str:
    """The beginning of a text on one line."""
    flat = safe(" ".join(text[: limit * 8].split()))
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"
