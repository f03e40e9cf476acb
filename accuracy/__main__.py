"""Commands of this folder: the page of accuracy, stored results made anew, frozen predictions, rows.

    python -m accuracy                                   stored errors on the shipped measurements, and coverage
    python -m accuracy update [--accept] [FILE.csv ...]  intervals (bands.toml) and stored results from these files
    python -m accuracy frozen [--update]                 how predictions of the frozen cases moved, or freeze them anew
    python -m accuracy rows [FILE.csv ...]               every row with its prediction, as CSV
    python -m accuracy gains [--update] [FILE.csv ...]   what each entry of what is known of sources brings elsewhere
    python -m accuracy within [FILE.csv ...]             what vLLM serves within measured latencies, over measured,
                                                         and how far two measured runs of a deployment agree in it

Files are the shipped measurements where none is named.
"""

from __future__ import annotations

import argparse
import json
import sys

from accuracy import frozen, gains, repeats, score, within
from accuracy.files import shipped
from accuracy.processes import cores, joined, measured_by
from shardwise.measured import rows_csv


def main(words: list[str]) -> int:
    """Run one command and return its status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = ("page", "update", "frozen", "rows", "gains", "within")
    parser.add_argument("command", nargs="?", choices=commands, default="page")
    parser.add_argument("files", nargs="*")
    parser.add_argument("--accept", action="store_true", help="store results though a headline became worse")
    parser.add_argument("--update", action="store_true", help="freeze the cases anew, or store the gains")
    given = parser.parse_intermixed_args(words)
    files = given.files or shipped()
    if given.command == "update":
        return score.update(files, given.accept)
    if given.command == "frozen":
        present = frozen.cases()
        print(*frozen.moved(frozen.stored(), present), sep="\n")
        if given.update:
            frozen.FROZEN.write_text(json.dumps(present, indent=1) + "\n", encoding="ascii")
    elif given.command == "rows":
        print(rows_csv(joined(measured_by(files, cores()), files).rows), end="")
    elif given.command == "gains":
        if given.update:
            gains.store(gains.gains(files))
        else:
            print(*gains.page(gains.rows(gains.gains(files))), sep="\n")
    elif given.command == "within":
        print(*within.lines([*within.rows_within(files, "vllm")]), *repeats.lines(files, "vllm"), sep="\n")
    else:
        if score.stored()["constants"] != score.constants_hash():
            print("# constants have changed since the stored run: python -m accuracy update FILES", file=sys.stderr)
        print(*score.page(), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
