"""Print the accuracy of this release, or make intervals and stored results anew from files of measurements.

    python -m accuracy                      stored errors on the shipped measurements, and stored coverage
    python -m accuracy update FILE.csv ...  intervals (bands.toml) and stored results from these files
    python -m accuracy update               the same from the shipped measurements

An update that makes the median error of a headline worse by more than a point is refused without --accept.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from accuracy import fits, targets, unseen
from accuracy.files import HERE, RESULTS, shipped
from accuracy.processes import cores, joined, measured_by
from accuracy.published import Published
from accuracy.residuals import Residual, left_out, paired, paired_left_out, residuals, share, share_of_groups, spread_of
from shardwise import InputError, count
from shardwise.cost import Spread
from shardwise.measured import Errors, Validation, quantile, summary

SOURCE = HERE.parent / "src" / "shardwise"
RESULT = RESULTS / "accuracy.json"
BANDS = SOURCE / "cost" / "bands.toml"
PUBLISHED = SOURCE / "cost" / "published.csv"
# Tables of the package that predictions rest on; bands are made of predictions.
_OF_PREDICTIONS = ("cost", "plans", "serving", "measured", "hardware/links.toml")
WORSE = 0.01
# A stack on a family of devices with fewer runs is shown with others.
FEWEST_SHOWN = 10
KEYS: dict[str, Callable[[Residual], str]] = {"source": lambda one: one.source, "device": lambda one: one.device}
_HEAD = """# Made by `python -m accuracy update`: how far published runs were off, by headline. `low`, `typical` and
# `high` are 10 %, median and 90 % of the logarithm of measured over predicted, in units of a scale: `scale` times the
# factors of the conditions of a run (`wider`), `widest` at most, beyond what typical runs take longer (`slower`,
# logarithms by family of devices; "" is any other; `waiting`, a share of their exposed messages). `paired` is what 80 %
# of pairs of runs lie within, two plans of one job of one source: the logarithm of the measured ratio of their values
# over the predicted one. `seen` are families of devices with runs, by stack or engine, `devices` all devices.
# Method: accuracy/residuals.py.
"""


def constants_files() -> list[Path]:
    """Return every table of constants that predictions rest on, of the package and of this folder.

    >>> "constants.toml" in [path.name for path in constants_files()]
    True
    """
    own = (SOURCE / name for name in _OF_PREDICTIONS)
    found = [path for part in own for path in (part.rglob("*.toml") if part.is_dir() else [part])]
    return sorted(path for path in (*found, *HERE.glob("*.toml"), *HERE.glob("kernels/*.toml")) if path != BANDS)


def constants_hash() -> str:
    """Return a hash of every table of constants that predictions rest on."""
    made = hashlib.sha256()
    for path in constants_files():
        made.update(path.read_bytes())
    return made.hexdigest()[:16]


def medians(found: Validation) -> dict[str, dict[str, float]]:
    """Return errors by metric, in shares."""
    rows = summary((row for row in found.rows if not row.source.startswith("megatron_ci")), ("metric",))
    return {one.group[0]: _row(one) for one in rows}


def _row(one: Errors) -> dict[str, float]:
    found = {"count": one.count, "bias": one.bias, "median": one.median_abs_error, "p90": one.p90_abs_error}
    return {name: round(value, 4) for name, value in found.items()}


def bands_text(made: Mapping[str, Spread]) -> str:
    """Return the file of bands as TOML."""
    lines = [_HEAD]
    for quantity, one in made.items():
        ends = {"low": one.low, "typical": one.typical, "high": one.high, "scale": one.scale}
        lines += [f'["{quantity}"]', *(f"{name} = {value:.4f}" for name, value in ends.items())]
        lines.append(f'rows = {one.rows}\nsources = {one.sources}\nsource = "{one.source}"')
        lines.append(f"devices = {json.dumps(one.devices)}")
        lines += [f"widest = {one.widest:.2f}", *([f"waiting = {one.waiting:.2f}"] if one.waiting else [])]
        if one.paired:
            lines += [f'["{quantity}".paired]', f"log = {one.paired.log:.4f}", f"pairs = {one.paired.pairs}"]
            lines.append(f'source = "{one.paired.source}"')
        lines.append(f'["{quantity}".wider]')
        lines += [f'"{word}" = {factor:.2f}' for word, factor in one.wider.items()]
        lines.append(f'["{quantity}".seen]')
        lines += [f'"{stack}" = {json.dumps(families)}' for stack, families in one.seen.items()]
        if one.slower:
            lines.append(f'["{quantity}".slower]')
            lines += [f'"{family}" = {log:.4f}' for family, log in one.slower.items()]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def update(files: Sequence[str], accept: bool) -> int:
    """Make intervals and results anew; returns 1 where a headline became worse and that was not accepted.

    The ends of intervals have the votes of runs that no constant was chosen beside: what constants were chosen beside
    is off by less than the next laboratory's runs are.
    """
    given, ours, apart = ([str(Path(file).resolve()) for file in some] for some in (files, shipped(), unseen.FILES))
    predictions = measured_by((*given, *ours, *apart), cores())
    found = joined(predictions, given)
    made: dict[str, Spread] = {}
    coverage: dict[str, dict[str, float]] = {}
    pairs: dict[str, dict[str, float]] = {}
    by_stack: list[dict[str, Any]] = []
    kinds: list[dict[str, Any]] = []
    known = residuals(found.rows)
    runs = [*known, *residuals(joined(predictions, apart).rows, stranger=True)]
    for quantity in sorted({one.quantity for one in runs}):
        own = [one for one in runs if one.quantity == quantity]
        if not own[0].parts:
            made[quantity] = spread_of(own)
        inside = {word: left_out(own, key, runs) for word, key in KEYS.items()}
        sources = len({one.source for one in own})
        coverage[quantity] = {"runs": len(own), "sources": sources, **coverage_of(inside)}
        chosen = [one for one in own if not one.stranger]
        pairs[quantity] = paired_left_out(paired(chosen))
        kinds += kinds_of_runs(quantity, inside["source"])
        by_stack += groups(quantity, chosen, inside["source"])
    new = medians(joined(predictions, ours))
    reached = targets.results(found)
    published = [Path(file) for file in files if not file.endswith("_cpu.csv")]
    said = targets.verdicts(fits.counts(published)["all"])
    worse = [*worsened(stored().get("shipped", {}), new), *worsened(stored().get("targets", {}), reached)]
    for line in worse:
        print(line)
    if worse and not accept:
        print("not stored: --accept stores it nevertheless")
        return 1
    BANDS.write_text(bands_text(made), encoding="ascii")
    shown = [one for one in runs if one.quantity in ("step_seconds", "request_seconds")]
    PUBLISHED.write_text(published_text(shown, parameters_of((*files, *apart))), encoding="ascii")
    by_source = summary(found.rows, ("source", "metric"))
    errors = {"metric": medians(found), "source": {" ".join(one.group): _row(one) for one in by_source}}
    record = {"constants": constants_hash(), "files": sorted(Path(f).name for f in files), "rows": len(found.rows),
              "predicted": len(found.predicted), "left_out": coverage, "pairs": pairs, "kinds": kinds,
              "groups": by_stack, "shipped": new, "errors": errors, "targets": reached, "verdicts": said}  # fmt: skip
    RESULT.write_text(json.dumps(record, indent=1) + "\n", encoding="ascii")
    return 0


def published_text(runs: Iterable[Residual], parameters: Callable[[str], int]) -> str:
    """Return the configurations that were run as CSV: how many runs, and the median of their errors."""
    found: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for one in runs:
        known = one.conditions
        where = (one.quantity, one.source, one.model, one.device, one.num_devices)
        found[*where, known.stack, known.family, "|".join(known.words)].append(one.error)
    text = io.StringIO()
    write = csv.writer(text, lineterminator="\n").writerow
    write(("headline", "source", "model", "device", "num_devices", "stack", "family", "known", "parameters", "runs",
           "error"))  # fmt: skip
    for key, errors in sorted(found.items()):
        write((*key, f"{parameters(key[2]):.3g}", len(errors), f"{quantile(errors, 0.5):.3f}"))
    return text.getvalue()


def parameters_of(files: Iterable[str]) -> Callable[[str], int]:
    """Return what counts the parameters of the models that rows of files name."""
    contexts = [Published(folder) for folder in sorted({Path(file).parent for file in files})]

    @cache
    def parameters(model: str) -> int:
        for context in contexts:
            try:
                return int(count(context.model(model)).parameters)
            except InputError:
                continue
        raise ValueError(f"{model} is in no models*.json beside the files and not in the catalogue")

    return parameters


def coverage_of(inside: Mapping[str, Mapping[Residual, bool]]) -> dict[str, float]:
    """Return the shares of runs inside bands made without their source or device, and the means over those.

    The last is the mean over sources that no constant was chosen beside, where there are any.
    """
    found = {}
    for word, held in inside.items():
        found[word] = round(share(held), 3)
        found[f"{word}s"] = round(share_of_groups(held, KEYS[word]), 3)
    strangers = {one: held for one, held in inside["source"].items() if one.stranger}
    apart = {"of_strangers": round(share_of_groups(strangers, KEYS["source"]), 3)} if strangers else {}
    return {"of_sources": found.pop("sources"), "of_devices": found.pop("devices"), **found, **apart}


def kinds_of_runs(headline: str, inside: Mapping[Residual, bool]) -> Iterator[dict[str, Any]]:
    """Yield the share of runs inside a band made without their source, of runs with a condition and of plain ones."""
    found: dict[str, dict[Residual, bool]] = defaultdict(dict)
    for one, held in inside.items():
        for word in one.conditions.words or ("plain",):
            found[word][one] = held
    for word, runs in sorted(found.items()):
        if len(runs) >= FEWEST_SHOWN:
            counts = {"runs": len(runs), "sources": len({one.source for one in runs})}
            yield {"headline": headline, "kind": word, **counts, "inside": round(share(runs), 3)}


def groups(headline: str, runs: Sequence[Residual], inside: Mapping[Residual, bool]) -> Iterator[dict[str, Any]]:
    """Yield errors by stack or engine and family of devices; groups of few runs stand together as "others"."""
    found: dict[tuple[str, str], list[Residual]] = defaultdict(list)
    for one in runs:
        found[one.stack, one.family].append(one)
    few = [group for group in found.values() if len(group) < FEWEST_SHOWN]
    kept = {name: group for name, group in found.items() if len(group) >= FEWEST_SHOWN}
    if few:
        kept["others", "any"] = [one for group in few for one in group]
    for (stack, family), group in sorted(kept.items()):
        errors = [one.error for one in group]
        absolute = [abs(error) for error in errors]
        figures = {"bias": quantile(errors, 0.5), "median": quantile(absolute, 0.5), "p90": quantile(absolute, 0.9)}
        figures["inside"] = share({one: inside[one] for one in group if one in inside})
        counts = {"runs": len(group), "sources": len({one.source for one in group})}
        rounded = {name: round(value, 4) for name, value in figures.items()}
        yield {"headline": headline, "stack": stack, "family": family, **counts, **rounded}


def worsened(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each metric or target whose median error grew by more than a point."""
    for metric, row in new.items():
        before = old.get(metric, row)["median"]
        if row["median"] > before + WORSE:
            yield f"worse: {metric}, median {before:.1%} -> {row['median']:.1%}"


def stored() -> dict[str, Any]:
    """Return the stored results, empty before the first."""
    if not RESULT.exists():
        return {}
    found: dict[str, Any] = json.loads(RESULT.read_text(encoding="ascii"))
    return found


def page() -> Iterator[str]:
    """Yield the lines of the section of accuracy/notes/results.md, as the stored run found them."""
    found = stored()
    yield "Shipped measurements (`python -m accuracy`):"
    yield ""
    yield "| metric | rows | bias | median error | 90 % below |"
    yield "|---|---:|---:|---:|---:|"
    for metric, row in found["shipped"].items():
        yield f"| {metric} | {row['count']} | {row['bias']:+.1%} | {row['median']:.1%} | {row['p90']:.1%} |"
    yield ""
    yield "What is wanted, and what is reached on the development rows:"
    yield ""
    yield from targets.page(found["targets"], found["verdicts"])
    yield ""
    yield "Sources whose median error is over twice what is wanted, and why:"
    yield ""
    yield from targets.why(found["targets"])
    yield ""
    yield f"All {found['rows']:,} development rows ({found['predicted']:,} predicted):"
    yield ""
    yield "| metric | rows | bias | median error | 90 % below |"
    yield "|---|---:|---:|---:|---:|"
    for metric, row in found["errors"]["metric"].items():
        yield f"| {metric} | {row['count']} | {row['bias']:+.1%} | {row['median']:.1%} | {row['p90']:.1%} |"
    yield ""
    yield "Share of runs inside the 10-90 % interval when it is made without their source, and without their device:"
    yield ""
    yield "| headline | runs | source left out | mean of sources | device left out | mean of devices |"
    yield "|---|---:|---:|---:|---:|---:|"
    for quantity, row in found["left_out"].items():
        shares = (row[name] for name in ("source", "of_sources", "device", "of_devices"))
        yield f"| `{quantity}` | {row['runs']} | {' | '.join(f'{one:.0%}' for one in shares)} |"
