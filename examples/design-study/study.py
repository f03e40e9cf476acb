"""Design study: which plan is best on which system, and what the system should be, for two models.

The questions are those of arXiv:2410.00273. Run `python examples/design-study/study.py --out FOLDER` for tables and
figures, with `--quick` for a small part.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import sections
from cases import GENERATIONS, JOBS, LAYOUTS, NETWORK, SYSTEMS, TITLES
from searches import Answer, Best, answers, days
from sections import QUICK, Field, Landscape, Scaling, Size, Sweep

LIMIT = SYSTEMS["B200"][1]["memory"]


def say(text: str = "") -> None:
    """Print a line."""
    sys.stdout.write(text + "\n")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; columns of numbers are set to the right."""
    body = [list(row) for row in rows]
    widths = [max(len(row[i]) for row in [list(heads), *body]) for i in range(len(heads))]
    right = [all(row[i][:1].isdigit() or row[i] in ("", "-") for row in body) for i in range(len(heads))]
    for row in [list(heads), *body]:
        cells = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)]
        say("  ".join(cells).rstrip())
    say()


def number(value: float | None) -> str:
    """Return three or more digits of a number, a dash for none."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def print_scaling(found: Scaling, size: Size) -> None:
    """Print days of every system and layout by devices, then the best plans and what their steps are made of."""
    for model in JOBS:
        say(f"STRONG SCALING  {TITLES[model]}: days of the run, best plan of all layouts")
        rows = []
        for system in size.systems:
            for domain in size.domains:
                best = [found.any(model, system, domain, n) for n in size.counts]
                cells = [number(days(model, b[1].seconds)) if b else "-" for b in best]
                rows.append([f"{system}, domains of {domain}", *cells])
        table(["", *(f"{n:,}" for n in size.counts)], rows)
    for model in JOBS:
        for system in size.systems:
            for domain in size.domains:
                _print_degrees(found, size, (model, system, domain))


def _print_degrees(found: Scaling, size: Size, case: tuple[str, str, int]) -> None:
    model, system, domain = case
    say(f"BEST PLANS  {TITLES[model]}, {system} in domains of {domain}")
    rows = []
    for count in size.counts:
        best = found.any(*case, count)
        if best is None:
            rows.append([f"{count:,}", "-", "", "nothing fits", *[""] * 6])
            continue
        b = best[1]
        shares = [f"{100 * share:.0f}" for share in b.shares.values()]
        rows.append([f"{count:,}", number(b.seconds), f"{b.held_bytes / 1e9:.0f}", b.words(), *shares])
    parts = ["compute %", "tensor %", "data %", "between %", "bubble %", "update %"]
    table(["devices", "step s", "GB", "plan", *parts], rows)


def print_layouts(found: Scaling, size: Size) -> None:
    """Print the step of each layout over the best 1D plan."""
    for model in JOBS:
        say(f"LAYOUTS  {TITLES[model]}: seconds of the best 2D plan over the best 1D plan (context, SUMMA)")
        rows = []
        for system in size.systems:
            for domain in size.domains:
                cells = [_ratios(found, (model, system, domain), n) for n in size.counts]
                rows.append([f"{system}, domains of {domain}", *cells])
        table(["", *(f"{n:,}" for n in size.counts)], rows)


def _ratios(found: Scaling, case: tuple[str, str, int], count: int) -> str:
    plain = found.one(*case, "1d", count)
    others = [found.one(*case, layout, count) for layout in ("cp", "summa")]
    if plain is None:
        return "1D none" if any(others) else "-"
    return " ".join(f"{o.seconds / plain.seconds:.2f}" if o else "-" for o in others)


def print_sweeps(rows: Sequence[Sweep]) -> None:
    """Print plans in which one degree stands; memory is not asked, and what would not fit is said."""
    for row in rows:
        say(f"ONE DEGREE STANDS  {TITLES[row.model]}, {LAYOUTS[row.layout]}, 16,384 B200 in domains of 8: {row.stands}")
        lines = [_sweep_line(row, i, best) for i, best in enumerate(row.found)]
        table(["plan", "step s", "GB", "", ""], lines)
        times = len(row.minima())
        say("not convex: " + str(times) + " local minima\n" if times > 1 else "one minimum\n")


def print_landscapes(drawn: Sequence[Landscape]) -> None:
    """Print step times over two degrees; an asterisk marks plans that do not fit."""
    for one in drawn:
        stands = ", ".join(f"{name} = {n}" for name, n in one.stands)
        say(f"LANDSCAPE  {TITLES[one.model]}, {LAYOUTS[one.layout]}, 16,384 B200 in domains of 8, {stands}: seconds")
        fits, everything = one.seconds(LIMIT), one.seconds(float("inf"))
        rows = []
        for n, row, kept in zip(one.up[1], everything, fits, strict=True):
            cells = [number(s) + ("" if s is None or k else "*") for s, k in zip(row, kept, strict=True)]
            rows.append([f"{one.up[0]} {n}", *cells])
        table(["", *(f"{one.across[0]} {n}" for n in one.across[1])], rows)


def _sweep_line(row: Sweep, place: int, best: Best) -> list[str]:
    fits = "fits" if best.held_bytes <= LIMIT else "does not fit"
    least = "local minimum" if place in row.minima() else ""
    return [row.names[place].replace("\n", ", "), number(best.seconds), f"{best.held_bytes / 1e9:.0f}", fits, least]


def print_map(title: str, drawn: Field, wanted: tuple[Sequence[float], Sequence[float]]) -> None:
    """Print the cells of a map that are nearest to wanted columns and rows."""
    say(f"MAP  {title}: {drawn.title}, {sections.MAP_COUNT:,} devices in domains of {sections.MAP_DOMAIN}: days")
    columns, rows = (_nearest(values, marks) for values, marks in zip((drawn.xs, drawn.ys), wanted, strict=True))
    heads = ["", *(f"{drawn.xs[x]:.0f} GB" for x in columns)]
    table(heads, ([number(drawn.ys[y]), *(number(drawn.values[y][x]) for x in columns)] for y in rows))


def _nearest(values: Sequence[float], marks: Sequence[float]) -> list[int]:
    return sorted({min(range(len(values)), key=lambda i: abs(values[i] - mark)) for mark in marks})


def print_published() -> None:
    """Print what the published best plans take here."""
    say("PUBLISHED BEST PLANS on 16,384 B200, and what they take here")
    rows = []
    for plan, report in sections.all_judged():
        p = report.plan
        degrees = f"tp {p.tp}, second {p.tp2 * p.cp}, pp {p.pp}, dp {p.dp}, micro-batch {p.micro_batch}"
        rows.append([plan.model, LAYOUTS[plan.layout], str(plan.domain), degrees, number(plan.seconds),
                     number(report.step_seconds), number(plan.gigabytes), number(report.device_bytes / 1e9),
                     "fits" if report.fits else "does not fit"])  # fmt: skip
    table(["model", "layout", "domain", "plan", "step s", "here s", "GB", "here GB", ""], rows)


def print_wider(found: Sequence[Answer]) -> None:
    """Print what a wider space finds, and what the rates of the catalogue change."""
    say("BEYOND  16,384 B200 in domains of 8")
    rows = []
    for a in found:
        best = a.best[NETWORK]
        p = best.plan
        more = f", {p.schedule} vpp {p.vpp}, {p.sharding}, recompute {p.recompute}"
        name = "more schedules, sharding, recompute" if len(a.ask.space) > 1 else a.ask.system
        rows.append(
            [a.ask.model, name, LAYOUTS[a.ask.layout], f"{a.plans:,}", number(best.seconds), best.words() + more]
        )
    table(["model", "space", "layout", "plans", "step s", "plan"], rows)


def claims(got: Results) -> Iterable[str]:
    """Yield what the tables say in sentences, each with its figures."""
    found, size = got.scaling, got.size
    cases = [(m, s, d) for m in JOBS for s in size.systems for d in size.domains]
    times = [[b[1].seconds for n in size.counts if (b := found.any(*case, n))] for case in cases]
    falls = sum(all(later < first for first, later in pairwise(row)) for row in times)
    yield f"a step gets shorter with every doubling of devices on {falls} of {len(cases)} systems and models"
    system, small, large = size.systems[-1], size.domains[0], size.domains[-1]
    for model in JOBS:
        gains = []
        for count in (512, 4096, 16384):
            near, far = found.any(model, system, small, count), found.any(model, system, large, count)
            gains += [f"{near[1].seconds / far[1].seconds - 1:.1%} on {count:,}"] if near and far else []
        yield f"{TITLES[model]}: fast domains of {large} in place of {small} {system} gain " + ", ".join(gains)
    for model in JOBS:
        least, most = _two_dimensional(found, size, model)
        yield f"{TITLES[model]}: the best 2D plan takes {least:.2f} to {most:.2f} of the best 1D plan's seconds"
    bent = sum(len(row.minima()) > 1 for row in got.sweeps)
    yield f"with one degree fixed, {bent} of {len(got.sweeps)} rows have more than one local minimum: not convex"
    for one in got.landscapes:
        (bent, of), (kept, left) = one.bent(float("inf")), one.bent(LIMIT)
        least_words = f"; where plans must fit, {kept} of {left}"
        yield f"{TITLES[one.model]}: {bent} of {of} rows of its landscape have more than one local minimum{least_words}"


def _two_dimensional(found: Scaling, size: Size, model: str) -> tuple[float, float]:
    ratios = []
    for system in size.systems:
        for domain in size.domains:
            for count in size.counts:
                plain = found.one(model, system, domain, "1d", count)
                twos = [t.seconds for name in ("cp", "summa") if (t := found.one(model, system, domain, name, count))]
                if plain and twos:
                    ratios.append(min(twos) / plain.seconds)
    return min(ratios), max(ratios)


def arguments() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the figures; left out, tables alone")
    parser.add_argument("--quick", action="store_true", help="a small part of the study")
    parser.add_argument("--workers", type=int, default=0, help="processes; left out, one for each core")
    return parser.parse_args()


@dataclass(frozen=True)
class Results:
    """The answers by question."""

    size: Size
    scaling: Scaling
    sweeps: Sequence[Sweep]
    landscapes: Sequence[Landscape]
    capacity: Sequence[Field]
    generation: Sequence[Field]
    beyond: Sequence[Answer]
    groups: dict[str, list[Answer]]


def results(size: Size, workers: int) -> Results:
    """Return the answers of all searches, which share the cores."""
    rows, drawn = sections.sweeps(size.whole), sections.landscapes(size.whole)
    asked = {
        "scaling": sections.scaling_asks(size),
        "sweeps": [ask for row in rows for ask in row.asks],
        "landscapes": [ask for one in drawn for ask in one.asks()],
        "capacity map": sections.capacity_asks(size),
        "generation map": sections.generation_asks(size),
        "beyond": sections.wider_asks() if size.whole else [],
    }
    done = iter(answers([ask for group in asked.values() for ask in group], workers))
    found = {name: [next(done) for _ in group] for name, group in asked.items()}
    swept, cells = iter(found["sweeps"]), iter(found["landscapes"])
    return Results(
        size=size,
        scaling=Scaling.of(found["scaling"]),
        sweeps=[sections.swept(row, [next(swept) for _ in row.asks]) for row in rows],
        landscapes=[one.filled([next(cells) for _ in one.asks()]) for one in drawn],
        capacity=sections.capacity_fields(size, found["capacity map"]),
        generation=sections.generation_fields(size, found["generation map"]),
        beyond=found["beyond"],
        groups=found,
    )


def main() -> None:
    """Run the study."""
    asked, start = arguments(), time.perf_counter()
    got = results(QUICK if asked.quick else Size(), asked.workers)
    searched = time.perf_counter() - start
    print_scaling(got.scaling, got.size)
    print_layouts(got.scaling, got.size)
    print_sweeps(got.sweeps)
    print_landscapes(got.landscapes)
    memory, rates = [80, 141, 192, 288, 384, 512, 1000], [0.5, 1, 2, 4, 8, 16]
    for field in got.capacity:
        print_map("capacity and bandwidth (TB/s)", field, (memory, rates))
    devices = list(GENERATIONS.values())
    for field in got.generation:
        nodes = [row[0] / 1e9 for row in devices], [row[2] / 1e12 for row in devices]
        print_map("memory of a generation and TFLOP/s", field, nodes)
    print_published()
    if got.beyond:
        print_wider(got.beyond)
    say("FINDINGS")
    for line in claims(got):
        say(f"- {line}")
    say("\nSEARCHES")
    rows = [_cost(name, group) for name, group in got.groups.items() if group]
    table(["", "searches", "plans", "legal", "core seconds"], rows)
    if asked.out:
        draw(asked.out, got)
    say(f"{searched:.1f} s of searches, {time.perf_counter() - start:.1f} s in all")


def _cost(name: str, group: Sequence[Answer]) -> list[str]:
    plans, legal = sum(a.plans for a in group), sum(a.legal for a in group)
    return [name, f"{len(group):,}", f"{plans:,}", f"{legal:,}", f"{sum(a.seconds for a in group):.1f}"]


def draw(folder: Path, got: Results) -> None:
    """Write the figures."""
    import figures

    folder.mkdir(parents=True, exist_ok=True)
    figures.scaling(got.scaling, got.size, folder)
    figures.layouts(got.scaling, got.size, folder)
    figures.degrees(got.scaling, got.size, folder)
    figures.sweeps(got.sweeps, LIMIT, folder)
    if got.landscapes:
        figures.landscapes(got.landscapes, LIMIT, folder)
    figures.capacities(got.capacity, folder)
    figures.generations(got.generation, got.size, folder)


if __name__ == "__main__":
    main()
