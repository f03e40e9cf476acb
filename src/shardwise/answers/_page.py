"""A page of styled lines: laid out once, printed plainly or in colour.

Glyphs differ as well as colours, so that a page pasted as plain text still says which part of a bar is what.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import TextIO, TypeAlias

from shardwise.records import dataclass

StyledText: TypeAlias = tuple[str, str]
MARGIN = 10
_NARROWEST = 12
FULL, DARK, MEDIUM, LIGHT, DOT = "\u2588", "\u2593", "\u2592", "\u2591", "\u00b7"
_ASCII = str.maketrans(
    dict(
        zip(
            "\u2588\u2593\u2592\u2591\u00b7\u2571\u2573\u25b2\u2502\u2514\u251c\u2500\u25aa\u00d7",
            "#=+-./x^|`|-ox",
            strict=True,
        )
    )
)


@dataclass(frozen=True, slots=True)
class Segment:
    """One part of a bar: what it is, how much, and how it looks."""

    label: str
    amount: float
    glyph: str
    style: str


class Page:
    """Lines of styled spans, at most `width` columns wide.

    >>> page = Page(40)
    >>> page.label("FITS", "62.1 of 80.0 GiB")
    >>> page.items(["one of two words more than a line", "two"])
    >>> print(page.plain())
    FITS      62.1 of 80.0 GiB
              - one of two words more than
                a line
              - two
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.lines: list[list[StyledText]] = []

    @property
    def body(self) -> int:
        """Columns to the right of the labels."""
        return self.width - MARGIN

    def add(self, *spans: StyledText) -> None:
        """Append one line of spans as they are."""
        self.lines.append(list(spans))

    def blank(self) -> None:
        """Append an empty line, never two in a row."""
        if self.lines and self.lines[-1]:
            self.lines.append([])

    def label(self, word: str, text: str, style: str = "bold", text_style: str = "") -> None:
        """Append text under a label in the margin, wrapped at the width."""
        pieces = textwrap.wrap(text, self.body, break_long_words=False, break_on_hyphens=False) or [""]
        gap = " " if len(word) >= MARGIN else ""
        self.add((f"{word:<{MARGIN}}" + gap, style), (pieces[0], text_style))
        for piece in pieces[1:]:
            self.add((" " * MARGIN, ""), (piece, text_style))

    def note(self, text: str, style: str = "") -> None:
        """Append text in the body, wrapped."""
        self.label("", text, "", style)

    def remark(self, text: str, style: str = "dim") -> None:
        """Append text over the whole width, wrapped."""
        for piece in textwrap.wrap(text, self.width, break_long_words=False, break_on_hyphens=False):
            self.add((piece, style))

    def items(self, texts: Iterable[str], style: str = "") -> None:
        """Append a list, each item wrapped with a hanging indent."""
        for text in texts:
            pieces = textwrap.wrap(text, self.body - 2, break_long_words=False, break_on_hyphens=False) or [""]
            for i, piece in enumerate(pieces):
                self.add((" " * MARGIN, ""), ("- " if i == 0 else "  ", "dim"), (piece, style))

    def bar(self, word: str, segments: Sequence[Segment], whole: float, text: str) -> None:
        """Append a bar of segments on the scale `whole`, with a text to the right of it."""
        cells = max(10, self.body - len(text) - 2)
        self.add((f"{word:<{MARGIN}}", "bold"), *cells_of(segments, whole, cells), ("  " + text, ""))

    def table(
        self, rows: Sequence[Sequence[str]], right: Iterable[int] = (), header: bool = False, indent: int = MARGIN
    ) -> None:
        """Append rows in aligned columns within the width; those in `right` are flush right.

        Where a table is wider than the page, columns stand closer, then columns of words are wrapped, the widest first;
        under a header the last columns then follow below, beside the first one again.
        """
        flush, rows = set(right), [list(row) for row in rows]
        widths = [max(len(r[i]) for r in rows if i < len(r)) for i in range(max(map(len, rows), default=0))]
        room = self.width - indent - sum(widths)
        gap = "  " if 2 * (len(widths) - 1) <= room else " "
        short = len(gap) * (len(widths) - 1) - room
        words = [i for i in range(len(widths)) if i not in flush]
        for i in sorted(words, key=lambda i: -widths[i]):
            cut = max(0, min(short, widths[i] - _NARROWEST))
            widths[i], short = widths[i] - cut, short - cut
        at = _last_that_fits(widths, self.width - indent) if header else len(widths)
        if at < len(widths):
            self.table([row[:at] for row in rows], [i for i in flush if i < at], header, indent)
            self.blank()
            rest = [[*row[:1], *row[at:]] for row in rows]
            self.table(rest, {0 if i == 0 else i - at + 1 for i in flush if i == 0 or i >= at}, header, indent)
            return
        for n, row in enumerate(rows):
            for line in _wrapped(row, widths):
                cells = [f"{c:>{widths[i]}}" if i in flush else f"{c:<{widths[i]}}" for i, c in enumerate(line)]
                self.add((" " * indent, ""), (gap.join(cells).rstrip(), "bold" if header and n == 0 else ""))

    def unbroken_table(self, rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> None:
        """Append rows under a header from the margin on, a line each: names of the last column may pass the width."""
        wide = Page(max(self.width, 200))
        wide.table(rows, right, header=True, indent=0)
        self.lines += wide.lines

    def plain(self) -> str:
        """Return the page without colour."""
        return "\n".join("".join(text for text, _ in line).rstrip() for line in self.lines)


def _last_that_fits(widths: Sequence[int], room: int) -> int:
    """Return how many columns fit in so many cells, two at least and one apart; all where those behind would not help.

    >>> _last_that_fits([4, 4, 4], 14), _last_that_fits([4, 4, 4], 13), _last_that_fits([40, 4, 4], 13)
    (3, 2, 3)
    """
    at, width = 0, -1
    while at < len(widths) and width + 1 + widths[at] <= room:
        at, width = at + 1, width + 1 + widths[at]
    return at if at > 1 else len(widths)


def _wrapped(row: Sequence[str], widths: Sequence[int]) -> Iterable[Sequence[str]]:
    """Return a row as lines whose cells are no wider than their columns; a word is cut where it has no room alone.

    >>> list(_wrapped(["1", "tp 4, dp 2"], [1, 6])), list(_wrapped(["pp 2, micro-batch 2"], [13]))
    ([('1', 'tp 4,'), ('', 'dp 2')], [('pp 2,',), ('micro-batch 2',)])
    >>> list(_wrapped(["", "tp 4, dp 2"], [0, 6]))
    [('', 'tp 4,'), ('', 'dp 2')]
    """
    if all(len(cell) <= widths[i] for i, cell in enumerate(row)):
        return [row]
    pieces = []
    for cell, room in zip(row, (max(1, width) for width in widths), strict=False):
        wide = any(len(word) > room for word in cell.split())
        pieces.append(textwrap.wrap(cell, room, break_on_hyphens=wide) or [""])
    return zip_longest(*pieces, fillvalue="")


def cells_of(segments: Sequence[Segment], whole: float, cells: int) -> list[StyledText]:
    """Return the spans of a bar; ends are rounded one after another, so that the bar is as long as its sum.

    >>> cells_of([Segment("a", 1, "#", ""), Segment("b", 1, "=", "")], 4, 8)
    [('##', ''), ('==', '')]
    """
    out, done, at = [], 0.0, 0
    for s in segments:
        done += s.amount
        end = min(cells, round(cells * done / whole)) if whole else 0
        if end > at:
            out.append((s.glyph * (end - at), s.style))
            at = end
    return out


def command_lines(page: Page, word: str, words: Sequence[str]) -> None:
    """Append a command under a heading, broken into lines that a shell takes as one; those of Windows take one line."""
    page.blank()
    page.add((word, "bold"))
    command_line(page, words)


def command_line(page: Page, words: Sequence[str]) -> None:
    """Append a command alone, broken into lines as those under a heading are."""
    lines, line = [], " " * 2
    for piece in words:
        if len(line) + len(piece) + 3 > page.width and line.strip() and sys.platform != "win32":
            lines.append(line + " \\")
            line = " " * 4
        line += piece if not line.strip() else " " + piece
    for text in [*lines, line]:
        page.add((text, "cyan"))


def substitutes(encoding: str) -> dict[int, str]:
    """Return ASCII in place of each glyph that an encoding lacks; consoles of Windows have some of them.

    >>> sorted(substitutes("cp437").values()), substitutes("utf-8")
    (['/', '^', 'o', 'x', 'x'], {})
    """
    return {glyph: ascii for glyph, ascii in _ASCII.items() if not _shows(encoding, chr(glyph))}


def _shows(encoding: str, glyph: str) -> bool:
    try:
        glyph.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def wants_colour(stream: TextIO | None) -> bool:
    """Return whether to print colour: a terminal, and `NO_COLOR` (no-color.org) not set."""
    return (
        stream is not None
        and not getattr(stream, "closed", False)
        and stream.isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM") != "dumb"
        and _takes_colour(stream)
    )


def _takes_colour(stream: TextIO) -> bool:
    """Return whether a terminal does what its escape sequences say; a console of Windows is asked to, once.

    Source: "Console Virtual Terminal Sequences" of Microsoft (ENABLE_VIRTUAL_TERMINAL_PROCESSING, 4; Windows 10).
    """
    if sys.platform != "win32":
        return True
    import ctypes
    import msvcrt

    kernel, mode = ctypes.windll.kernel32, ctypes.c_ulong()
    console = ctypes.c_void_p(msvcrt.get_osfhandle(stream.fileno()))
    # Without a mode it is no console of Windows but another's terminal, which says so by being one.
    return not kernel.GetConsoleMode(console, ctypes.byref(mode)) or bool(
        kernel.SetConsoleMode(console, ctypes.c_ulong(mode.value | 4))
    )


# Select Graphic Rendition of ECMA-48 (5th edition, 1991), section 8.3.117; bright colours as xterm has them.
_COLOURS = {
    name: 30 + i for i, name in enumerate(["black", "red", "green", "yellow", "blue", "magenta", "cyan", "white"])
}
_SGR = {"bold": 1, "dim": 2, **_COLOURS, **{f"bright_{name}": code + 60 for name, code in _COLOURS.items()}}


def coloured(text: str, style: str) -> str:
    r"""Return a text in a style such as "bold red", as terminals read it.

    >>> coloured("FITS", "bold green"), coloured("plain", "")
    ('\x1b[1;32mFITS\x1b[0m', 'plain')
    """
    codes = ";".join(str(_SGR[word]) for word in style.split())
    return f"\x1b[{codes}m{text}\x1b[0m" if codes and text else text


def text_of(page: Page, stream: TextIO | None) -> str:
    """Return a page as text for a stream: in colour for a terminal, in ASCII where it shows nothing else."""
    translate = substitutes(getattr(stream, "encoding", None) or "ascii")
    if not wants_colour(stream):
        return page.plain().translate(translate) + "\n"
    lines = ("".join(coloured(text.translate(translate), style) for text, style in line) for line in page.lines)
    return "\n".join(lines) + "\n"


def label_width(page: Page) -> int:
    """Return the columns that a legend has for names."""
    return min(30, page.body - 24)


def legend(page: Page, segments: Sequence[Segment], whole: float, show: Callable[[float], str]) -> None:
    """Append a row for each part of a bar: its glyph, amount and share; parts of nothing are left out."""
    for s in segments:
        if s.amount:
            amount = max(0, 13 - max(0, len(s.label) - label_width(page)))
            row = f" {s.label:<{label_width(page)}}{show(s.amount):>{amount}}{s.amount / whole:>9.1%}"
            page.add((" " * MARGIN, ""), (s.glyph, s.style), (row, ""))


def mark_limit(page: Page, share: float, words: str, filled: int) -> None:
    """Append a mark under the bar above at a share of it; `filled` are the columns of the text next to the bar."""
    cells = max(10, page.body - filled - 2)
    at = min(cells - 1, round(cells * share))
    left = at > len(words)
    page.add(
        (" " * (MARGIN + at - (len(words) + 1 if left else 0)), ""),
        (f"{words} ^" if left else f"^ {words}", "bold red"),
    )


def assumptions(page: Page, notes: Sequence[str]) -> None:
    """Append what was assumed."""
    if notes:
        page.add(("ASSUMED", "bold"))
        page.items(notes, "dim")


def show_verdict(fits: bool, chance: float, risk: float) -> tuple[str, str]:
    """Return the word of a verdict and its style; what fits with less than the chance that was asked is a risk.

    >>> show_verdict(True, 0.7, 0.0)[0], show_verdict(True, 0.7, 0.9)[0], show_verdict(False, 0.0, 0.9)[0]
    ('FITS', 'RISKY', 'NO FIT')
    """
    if not fits:
        return "NO FIT", "bold red"
    return ("RISKY", "bold yellow") if chance < risk else ("FITS", "bold green")


def show_chance(chance: float) -> str:
    """Return a chance in percent, its ends as bounds.

    >>> show_chance(0.876), show_chance(0.99999), show_chance(0.0)
    ('88%', 'over 99%', 'under 1%')
    """
    return "over 99%" if chance > 0.99 else "under 1%" if chance < 0.01 else f"{chance:.0%}"
