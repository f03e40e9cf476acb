"""How fast two published searches are, run from checkouts of their repositories by an interpreter that has their needs.

Calculon (github.com/calculon-ai/calculon; needs psutil and pandas): its own search function on random parts of its
space of GPT-3 175B on 4,096 A100-80GB at a batch of 3,072, as shipped, and with Python's logging switched off, which is
what most of its time goes to. transformer-perf-estimates (github.com/ShashankSubramanian/transformer-perf-estimates;
needs numpy, matplotlib and pandas before 3): its three solvers on GPT-3 and A100, candidates as
it prints them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

CALCULON = r"""
import json, logging, random, sys, time
root, quiet, seconds = sys.argv[1], sys.argv[2] == "quiet", float(sys.argv[3])
sys.path.insert(0, root)
import calculon
from calculon.llm import Llm, System
from calculon.llm.optimal_execution import OptimalExecution as Search
from calculon.util import pick
if quiet:
    logging.disable(logging.CRITICAL)
app = Llm.Application(calculon.io.read_json_file(root + "/models/gpt3-175B.json"))
system = System(calculon.io.read_json_file(root + "/systems/a100_80g.json"))
n, batch, parts = 4096, 3072, []
for tp in Llm.get_all_tensor_parallelisms(n, app.hidden, app.attn_heads):
    for pp in Llm.get_all_pipeline_parallelisms(n, tp, app.num_blocks):
        dp = Llm.get_data_parallelism(n, tp, pp)
        for chunks in Llm.get_valid_pipeline_interleavings(app.num_blocks, pp):
            size = Search.get_batch_size(dp, batch)
            for again in ("full", "attn_only", "none") if size else ():
                for sharded in pick(dp > 1, [True, False], [False]):
                    for messages in ("ar", "p2p_rs_ag", "rs_ag"):
                        parts.append((False, 1, False, n, batch, "float16", app, system, tp, pp, dp, chunks, size,
                                      again, sharded, messages, [True], False, True, True))
random.Random(0).shuffle(parts)
start, tried, good, done = time.process_time(), 0, 0, 0
for done, part in enumerate(parts, 1):
    _, count, ran, *_ = Search.search(*part)
    tried, good = tried + count, good + ran
    if time.process_time() - start > seconds:
        break
print(json.dumps([tried, good, time.process_time() - start, done / len(parts)]))
"""
ESTIMATES = r"""
import contextlib, io, json, re, sys, time
root, name, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
sys.path.insert(0, root)
import execution, models
model = dict(models.models["gpt3"])
model["f"] = 4 * model["e"]
with open(root + "/systems/config-A100.json") as file:
    system = {**json.load(file), "nvlink_size": 8}
start, tried, good, printed = time.process_time(), 0, 0, io.StringIO()
for n in (64, 128, 256, 512, 1024):
    with contextlib.redirect_stdout(printed):
        found = getattr(execution, name)(model, [n], global_batch_size=3072, system=system, nlargest=10**9)
    good += sum(map(len, found))
    if time.process_time() - start > seconds:
        break
tried = sum(map(int, re.findall(r"candidates = (\d+)", printed.getvalue())))
print(json.dumps([tried, good, time.process_time() - start, 1.0]))
"""


@dataclass(frozen=True, slots=True)
class Rate:
    """What a peer did: plans tried, those of them that run and fit, seconds of one core, and the share of its space."""

    name: str
    tried: int
    good: int
    seconds: float
    share: float = 1.0

    @property
    def tried_per_second(self) -> float:
        """Plans a second of one core, those it refuses included."""
        return self.tried / self.seconds


def _run(name: str, program: str, *words: str) -> Rate:
    done = subprocess.run((*words[:1], "-c", program, *words[1:]), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name} does not run:\n{done.stderr[-2000:]}")
    return Rate(name, *json.loads(done.stdout.splitlines()[-1]))


def calculon(path: str, python: str, seconds: float) -> list[Rate]:
    """Return the rates of Calculon as shipped and with its logger quietened."""
    ways = (("Calculon, as shipped", "shipped"), ("Calculon, logging off", "quiet"))
    return [_run(name, CALCULON, python, path, way, str(seconds)) for name, way in ways]


def estimates(path: str, python: str, seconds: float) -> list[Rate]:
    """Return the rates of the three solvers of transformer-perf-estimates."""
    ways = ("execute_1d", "execute_seqp", "execute_2d")
    return [_run(f"transformer-perf-estimates, {way}", ESTIMATES, python, path, way, str(seconds)) for way in ways]
