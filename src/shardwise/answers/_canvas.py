"""What pictures are drawn on: sizes, light and dark, the style of all of them, and writing them to a file."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from shardwise.records import dataclass

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 7.6  # inches: the text of a page
SIZES = {"page": WIDTH, "column": 3.5, "slide": 9.6}
"""Inches of a picture as it is laid out: a page's text, one of two columns of a paper, a slide of 16 to 9."""
_SLIDE = 16 / 9
_SLIDE_PIXELS = 1920
INK, GREY, PALE, RED = "#1a1a1a", "#5f6368", "#d9d9d9", "#b2182b"
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 8.0,
    "text.color": INK,
    "axes.titlesize": 9.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8.0,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.6,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "legend.fontsize": 7.2,
    "legend.frameon": False,
    "hatch.linewidth": 0.5,
    "svg.hashsalt": "shardwise",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: {scheme} }}
body {{ margin: 2rem auto; max-width: 75rem; font: 15px/1.45 system-ui, sans-serif; padding: 0 1rem;
  color: {ink}; background: {back} }}
table {{ border-collapse: collapse; margin: 0.5rem 0 1.5rem; font-size: 13px }}
th, td {{ padding: 2px 10px; border-bottom: 1px solid {line}; text-align: left; vertical-align: top }}
td.n, th.n {{ text-align: right; font-variant-numeric: tabular-nums }}
.wide {{ overflow-x: auto }} .wide svg {{ width: 100%; height: auto; min-width: {least} }}
.wide table.words {{ min-width: 44rem; overflow-wrap: anywhere }}
summary {{ cursor: pointer; font-weight: 600; margin: 1rem 0 }}
</style>
</head>
<body>
{body}
</body>
</html>
"""


@dataclass(frozen=True, slots=True)
class Canvas:
    """What is drawn on: a size by name, and whether it is dark."""

    size: str = "page"
    dark: bool = False


_PAPERS = [Canvas()]
# What is neutral in the light, and its like in the dark, with the one colour that is lost there; texts within coloured
# bars stay as they are.
_DARK = {
    INK: "#e8eaed",
    GREY: "#9aa0a6",
    PALE: "#80858b",
    RED: "#ff7b7b",
    "#e3e3e3": "#3a3d41",
    "#ffffff": "#1b1d21",
    "#f4f4f4": "#2a2d31",
    "#332288": "#6f60cf",
}
ON_LIGHT, ON_DARK = "#000000", "#fefefe"


@contextmanager
def styled(paper: Canvas = Canvas()) -> Iterator[None]:  # noqa: B008 (frozen)
    """Draw and save in the style of this project on some paper, whatever the settings of the user are."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        _PAPERS.append(paper)
        try:
            yield
        finally:
            _PAPERS.pop()


def paper_width() -> float:
    """Return inches of what is drawn on.

    >>> with styled(Canvas("column")):
    ...     paper_width()
    3.5
    """
    return SIZES[_PAPERS[-1].size]


def narrow() -> bool:
    """Return whether panels stand below each other that a page has side by side."""
    return paper_width() < 5


def slide() -> bool:
    """Return whether panels that a page has below each other stand in two columns."""
    return paper_width() > WIDTH


def fitting(columns: int) -> int:
    """Return the columns of a legend that has so many on a page."""
    return max(1, round(columns * paper_width() / WIDTH - 0.3))


def _darken(figure: Figure) -> None:
    """Give what is neutral in a figure its like in the dark."""
    from matplotlib.colors import to_hex
    from matplotlib.patheffects import withStroke
    from matplotlib.text import Text

    def dark(colour: Any) -> Any:
        return _DARK.get(to_hex(colour))

    ways = ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor")
    for artist in figure.findobj():
        for way in ways:
            read, write = getattr(artist, f"get_{way}", None), getattr(artist, f"set_{way}", None)
            if read is None or write is None:
                continue
            with suppress(ValueError, TypeError):
                root = read()
                if isinstance(root, Sequence) or not hasattr(root, "ndim") or root.ndim == 1:
                    new = dark(root)
                elif len(root) == 1:
                    new = dark(root[0])
                else:
                    new = None
                if new is not None:
                    write(new)
    for text in figure.findobj(Text):
        if text.get_path_effects():
            text.set_path_effects([withStroke(linewidth=1.8, foreground=_DARK["#ffffff"])])
    for axes in figure.axes:
        axes.tick_params(axis="both", which="both", color=_DARK[GREY], labelcolor=_DARK[INK])


def _as_slide(figure: Figure) -> None:
    """Give a figure the shape of a slide: taller where it is flat, wider where it is tall."""
    width, height = figure.get_size_inches()
    figure.set_size_inches(max(width, height * _SLIDE), max(height, width / _SLIDE))


def save(figure: Figure, path: str) -> None:
    """Write a figure as its file name ends: .svg, .png, .pdf, or .html with the SVG inside."""
    kind, paper = path.lower().rpartition(".")[2], _PAPERS[-1]
    if kind == "html":
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            file.write(page_of(str(figure.get_label()), svg_of(figure), paper.dark))
        return
    _prepare(figure, paper)
    # Without a date the same answer gives the same file.
    undated: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
    dpi = _SLIDE_PIXELS / figure.get_size_inches()[0] if paper.size == "slide" else 200
    figure.savefig(path, format=kind, dpi=dpi, metadata=undated, facecolor=figure.get_facecolor())


def _prepare(figure: Figure, paper: Canvas) -> None:
    """Give a figure the shape and the colours of its paper, and lay it out."""
    if paper.size == "slide":
        _as_slide(figure)
    if paper.dark:
        _darken(figure)
    _settle(figure)


def svg_of(figure: Figure) -> str:
    """Return a figure as an element of a page, in a frame that scrolls where the page is narrower than it can be.

    Its letters are drawn as outlines: what it says at its top is its description for those who cannot see it.
    """
    import html
    import io

    _prepare(figure, _PAPERS[-1])
    made = io.StringIO()
    figure.savefig(made, format="svg", metadata={"Date": None}, facecolor=figure.get_facecolor())
    drawn = made.getvalue()
    heading = [text.get_text() for text in figure.axes[0].texts]
    panels = [axes.get_title("left") or axes.get_title() for axes in figure.axes[1:]]
    description = html.escape("; ".join(text.replace("\n", "; ") for text in (*heading, *panels) if text))
    svg = drawn[drawn.index("<svg") + len("<svg") :]
    return f'<div class="wide" tabindex="0"><svg role="img" aria-label="{description}"{svg}</div>'


def page_of(title: str, body: str, dark: bool = False) -> str:
    """Return a document of its own with the style of this project inside, for phones too.

    >>> page_of("a & b", "<p>1</p>").count("a &amp; b")
    1
    """
    import html

    colours = {"ink": INK, "line": "#e3e3e3", "back": "#ffffff"}
    chosen = {name: _DARK[colour] if dark else colour for name, colour in colours.items()}
    # A column is readable on a phone; what is laid out for a page scrolls there.
    least = "100%" if narrow() else "44rem"
    scheme = "dark" if dark else "light"
    return _PAGE.format(title=html.escape(title), body=body, scheme=scheme, least=least, **chosen)


def _settle(figure: Figure) -> None:
    """Lay a figure out once and keep panels where they are, without the last digits, which vary from run to run."""
    from matplotlib.text import Text

    lay_out(figure)
    if narrow():
        for axes in figure.axes:
            room = (1 - axes.get_position().x0) * figure.get_size_inches()[0] * 72
            for text in axes.findobj(Text):
                if text.get_text() and text.get_text() == axes.get_title("left"):
                    text.set_text("\n".join(textwrap.wrap(text.get_text(), int(room / 6.1))))
        lay_out(figure)
    # No engine at all: "none" leaves one that keeps places, and a figure with an engine is drawn twice to be saved.
    figure.set_layout_engine(None)
    for axes in figure.axes:
        left, bottom, width, height = (round(float(v), 5) for v in axes.get_position().bounds)
        axes.set_position((left, bottom, width, height))


def lay_out(figure: Figure) -> None:
    """Give panels their places, which asks for the room that texts take and for no drawing."""
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)


def plain_log(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    low, high = axis.get_view_interval()
    few = 0 < low < high < 8 * low  # of 1, 2 and 5 such an axis may have one or none
    subs = (1.0, 2.0, 5.0) if high < 500 * low else (1.0,)
    axis.set_major_locator(MaxNLocator(4) if few else LogLocator(10, subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())
