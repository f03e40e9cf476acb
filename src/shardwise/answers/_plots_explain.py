"""`explain` as an icicle: a number as wide as the picture, and below it what it is made of, each as wide as its share.

Kruskal and Landwehr 1983: rectangles below each other show a tree and what each branch adds.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shardwise.answers._canvas import paper_width
from shardwise.answers._explained import ExplainedNumber, below_of, show_value
from shardwise.answers._plots import head_height, header, ink_on, wrapped
from shardwise.records import dataclass

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Paul Tol's "light" scheme (personal.sron.nl/~pault, 2021), one colour for each part of the number at the top.
_COLOURS = ("#77AADD", "#EE8866", "#EEDD88", "#FFAABB", "#99DDFF", "#44BB99", "#BBCC33", "#AAAA00")
_REST = "#DDDDDD"
_LEAST = 0.002  # of the picture's width: narrower parts are drawn as one
_WIDE = 0.05  # of a part's parent: narrower ones do not count as several
_ROW = 0.52  # inches
_TELLING = 8  # letters: less of a longer name tells nothing


@dataclass(frozen=True, slots=True)
class Piece:
    """One rectangle: its level, where it begins and how wide it is as shares of the whole, its label and colour."""

    level: int
    start: float
    share: float
    label: str
    amount: float
    colour: str


def pieces(at: ExplainedNumber, depth: int) -> list[Piece]:
    """Return the rectangles of a number opened to a depth; those of a level lie below what they add up to.

    What is taken off again is left out, and the parts beside it are narrower by as much. Parts too narrow to see are
    drawn as one.
    """
    return [Piece(0, 0.0, 1.0, _name(at), at.value, _REST), *_drawn(at, depth, (1, 0.0, 1.0), "")]


def _name(at: ExplainedNumber) -> str:
    return at.path[-1] if at.path else at.node.name


def _drawn(at: ExplainedNumber, depth: int, place: tuple[int, float, float], colour: str) -> Iterator[Piece]:
    level, start, room = place
    if level > depth or not at.value:
        return
    rest, below_it = 0.0, below_of(at)
    # What is nearly all of its parent has no colour yet: parts are told apart where there are several.
    alone = sum(part.amount > _WIDE * at.value for part, _ in below_it) < 2
    whole = max(at.value, sum(max(part.amount, 0.0) for part, _ in below_it))
    for i, (part, below) in enumerate(below_it):
        share = room * part.amount / whole
        if share <= 0:
            continue
        if share < _LEAST:
            rest += share
            continue
        own = colour or ("" if alone and part.amount > _WIDE * at.value else _COLOURS[i % len(_COLOURS)])
        count = f"{part.times:.4g} x " if part.times >= 1 and part.times != 1 else ""
        yield Piece(level, start, share, count + part.label, part.amount * abs(at.times), own or _REST)
        if below is not None:
            yield from _drawn(below, depth, (level + 1, start, share), own)
        start += share
    if rest >= _LEAST:
        yield Piece(level, start, rest, "smaller parts", rest / room * whole * abs(at.times), _REST)


def explain_figure(at: ExplainedNumber, what: str, depth: int, command: str = "") -> Figure:
    """Return the icicle of a number of an answer, the number itself at the top, under the command that asked for it."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    drawn = pieces(at, depth)
    rows, unit = 1 + max(piece.level for piece in drawn), at.unit
    name = " of ".join([*at.path[-1:], what.replace("_", " ")])
    title = f"{name}: {show_value(at.value, unit)}"
    lines = [command] if command else []
    lines.append("each row adds up to the part above it; widths are shares of the number at the top")
    text = wrapped(lines, paper_width())
    heights = [head_height(title, text), _ROW * rows + 0.3]
    engine = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.06)
    figure = Figure(figsize=(paper_width(), sum(heights)), layout=engine)
    figure.set_label(title)
    grid = figure.add_gridspec(2, 1, height_ratios=heights)
    header(figure.add_subplot(grid[0]), title, text)
    axes = figure.add_subplot(grid[1])
    for piece in drawn:
        _draw(axes, piece, unit)
    axes.set_xlim(0, 1)
    axes.set_ylim(rows, 0)
    axes.set_yticks([])
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    return figure


def _draw(axes: Axes, piece: Piece, unit: str) -> None:
    """Draw one rectangle, with its name and its amount where they have room."""
    from matplotlib.patches import Rectangle

    edge: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.6}
    axes.add_patch(Rectangle((piece.start, piece.level + 0.03), piece.share, 0.94, facecolor=piece.colour, **edge))
    # A letter of 7 points is some 3.9 points wide.
    letters = int((piece.share * (paper_width() - 0.3) * 72 - 4) / 3.9)
    amount = show_value(piece.amount, unit)
    label_lines = _lines(piece.label, letters, 2 if len(amount) <= letters else 3)
    if label_lines:
        label_lines += [amount] if len(amount) <= letters else []
        middle = (piece.start + piece.share / 2, piece.level + 0.5)
        look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7, "color": ink_on(piece.colour)}
        axes.text(*middle, "\n".join(label_lines), **look)


def _lines(text: str, letters: int, most: int) -> list[str]:
    """Return a name in so many lines at most, cut behind a whole word; none where not even the first two fit.

    >>> _lines("input gradients and recompute", 16, 2), _lines("4 x input gradients", 4, 2)
    (['input gradients', 'and recompute'], [])
    """
    pieces = textwrap.wrap(text, letters, break_long_words=False) if letters > 3 else []
    kept = pieces[:most]
    if not kept or max(map(len, kept)) > letters or (len(pieces) > most and len(" ".join(kept)) < _TELLING):
        return []
    return kept if len(pieces) <= most else [*kept[:-1], kept[-1][: letters - 2] + ".."]
