"""Scripts that ask for more than a machine has, and those that are cut off: refused, or answered, at once."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from command_line import bounded_work
from shardwise.errors import InputError
from shardwise.formats import Imported
from shardwise.formats.megatron import read as read_script
from shardwise.shell import Budget, commands_of

RUN = "torchrun --nproc_per_node 8 a.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128"
RUN += " --max-position-embeddings 128 --micro-batch-size 1 --vocab-size 100"
LOOPS = "".join(f"for x{n} in " + "w " * 100 + "; do " for n in range(7)) + "A=1; " + "done; " * 7
BEYOND = {
    "doubling": "A=aaaaaaaa\n" + "A=$A$A\n" * 60,
    "doubling with +=": "A=aaaaaaaa\n" + "A+=$A\n" * 60,
    "doubling of an array": "A=(a b c d)\n" + 'A+=("${A[@]}")\n' * 60,
    "doubling by a default": "A=aaaaaaaa\n" + 'A="${B:-$A$A}"\n' * 60,
    "growing one by one": "A=" + "a" * 1000 + "\n" + "A+=b\n" * 50_000,
    "nested loops": LOOPS,
    "function that calls itself": "f() { f; }; f",
    "functions that call each other": "f() { g; g; }; g() { f; f; }; f",
    "eval of itself": 'A=\'eval "$A"\'; eval "$A"',
    "eval that doubles": 'A=\'A=$A$A; eval "$A"\'; eval "$A"',
    "nested if": "if [ 1 ]; then " * 3000 + "a; " + "fi; " * 3000,
    "nested braces": "{ " * 3000 + "a; " + "}; " * 3000,
    "nested arrays": "A=(" * 3000,
    "nested case": "case a in a) " * 3000,
    "a word for each of many": "A=(" + "a " * 5000 + ")\n" + 'r "${A[@]}"\n' * 5000,
    "pattern of stars": "A=" + "a" * 10_000 + ("\ncase $A in " + "*a" * 5000 + "b) x;; esac") * 3,
}
ODD = {
    "minus signs": "A=$((" + "-" * 100_000 + "1))",
    "brackets": "A=$((" + "(" * 3000 + "1" + ")" * 3000 + "))",
    "choices": "A=$((" + "1 ? 1 : " * 3000 + "1))",
    "powers": "A=$((9**9**9**9**9))",
    "shift": "A=$((1 << 99999999999))",
    "not a number": "A=$((1or 2)); B=$((0777)) C=$((08)) D=$((\u00b2)) E=$((9" + "9" * 5000 + "))",
    "digits": "#SBATCH --nodes=" + "9" * 5000 + "\nNNODES=" + "9" * 5000,
    "superscripts": "#SBATCH --nodes=\u00b2\nGPUS_PER_NODE=\u00b2; NNODES=\u00b2; echo ${A[\u00b2]} $\u00b2",
    "negations": "if [ " + "! " * 3001 + "-z x ]; then A=1; fi",
    "alternatives": "if [ " + "a -o " * 3000 + "a ]; then A=1; fi",
    "conjunctions": "[[ a " + "&& a " * 20_000 + "]]; " + "a && " * 20_000 + "a",
    "here-documents": "".join(f"cat <<E{n}\nx\nE{n}\n" for n in range(5000)),
    "notes": "".join(f"source a{n}\n" for n in range(20_000)),
    "quotes": '"' * 99_999,
    "dollars": "A='" + "$" * 100_000 + "'",
    "open substitutions": "echo " + "$(a" * 30_000,
    "open braces": "echo " + "${a" * 30_000,
    "defaults in defaults": "echo " + "${A:-" * 3000 + "}" * 3000,
    "comments": "# a\n" * 250_000,
}
CUT = {
    "for x in a; do": "do",
    "while": "do",
    "case x in a": "case",
    "f() {": "{",
    "{": "{",
    "if [ a ]; then": "if",
    "A=(": "(",
    "$((": "$(",
    "${": "${",
    "`": "`",
    '"': '"',
    "'": "'",
}
STRAY = ["function", "function f", "f()", "; function ;", "}", ")", "<<", "|", "done", "fi"]
QUOTED = ["grep '^a$'", 'grep "^a$"', "IFS=$'\\t'", 'A="${A//\\"/}"', "A=$(awk '(' <<< \"(\")"]


@pytest.fixture(autouse=True)
def _limit() -> object:
    """Fail where an input takes more than bounded work can, or warns whoever reads it."""
    with warnings.catch_warnings(), bounded_work():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("name", BEYOND)
def test_what_is_beyond_the_budget_is_refused(name: str) -> None:
    """Growth, depth and turns without end are refused by name of the file within seconds."""
    with pytest.raises(InputError, match=r"file = 'run.sh': (takes|makes|nests)"):
        read_script(BEYOND[name] + "\n" + RUN, "run.sh")


@pytest.mark.parametrize("name", ODD)
def test_what_is_odd_changes_nothing_around_it(name: str) -> None:
    """Arithmetic without end, digits that are none and open quotes are an answer or a refusal within seconds."""
    case = _case(ODD[name] + "\n" + RUN)
    assert case is None or case.model is not None


def _case(text: str) -> Imported | None:
    try:
        return read_script(text, "run.sh")
    except InputError:
        return None


@pytest.mark.parametrize("end", CUT)
def test_a_script_that_is_cut_off_is_refused(end: str) -> None:
    """What is missing behind a construct that never closes may change any number: the mark that opened it is named."""
    with pytest.raises(InputError, match="run.sh.*ends before what " + re.escape(CUT[end])):
        read_script(RUN + "\n" + end, "run.sh")


@pytest.mark.parametrize(
    "text", [*(f"{RUN}\n{end}" for end in STRAY), *(f"{begin}\n{RUN} --lr '1'" for begin in QUOTED)]
)
def test_marks_that_open_nothing_take_nothing_from_a_command(text: str) -> None:
    """Stray words, quotes behind a dollar and brackets within quotes change nothing around them."""
    case = _case(text)
    assert case is not None
    assert case.plan.dp == 8


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("--nproc_per_node \u00b2", ""),
        ("--pipeline-model-parallel-size 99999999999", "--pipeline-model-parallel-size"),
        ("--num-layers " + "9" * 5000, "--num-layers"),
        ("--num-layers 0 --pipeline-model-parallel-size 1", "--num-layers"),
        ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 2", ""),
        ("--pipeline-model-parallel-layout (t)*99999999999", "--pipeline-model-parallel-layout"),
        ("--pipeline-model-parallel-layout " + "t*" * 50_000, "--pipeline-model-parallel-layout"),
        ("--moe-layer-freq " + "[1]*" * 5000 + "[1] --num-experts 2", "--moe-layer-freq"),
        ("--moe-layer-freq 1or --num-experts 2", "--moe-layer-freq"),
        ("--hidden-dropout 1e999", "--hidden-dropout"),
        ("--data-path " + "$" * 50_000, ""),
    ],
)
def test_values_beyond_sense_are_named(words: str, field: str) -> None:
    """Numbers and lists that no model has are problems of their argument."""
    kept = RUN.replace("--num-layers 2 ", "") if "--num-layers" in words else RUN
    try:
        read_script(f"{kept} {words}", "run.sh")
    except InputError as error:
        assert not field or field in {problem.field for problem in error.problems}
    else:
        assert not field


ARITHMETIC = {
    "7 / -2": "-3", "-7 % 3": "-1", "2 ** 62 * 2": str(-(2**63)), "1 ? 2 : 1 / 0": "2", "0 && 1 / 0": "0",
    "1 || n": "1", "0x10 + 010": "24", "!0 + ~0": "0", "1 << 4 | 1": "17", "3 > 2 == 1": "1", "a * 2": "4", "b": "0",
    "-- 5": "5",
}  # fmt: skip


@pytest.mark.parametrize("text", ARITHMETIC)
def test_arithmetic_is_that_of_bash(text: str) -> None:
    """Whole numbers of 64 bits, division towards zero, the precedence of C; a variable holds an expression."""
    assert commands_of(f"a=1+1; b=; r $(({text}))").commands == [["r", ARITHMETIC[text]]]


@given(
    st.integers(-(2**40), 2**40),
    st.sampled_from("+-*/%<>&|^"),
    st.integers(-(2**20), 2**20),
)
@settings(derandomize=True)
def test_operators_agree_with_python(a: int, mark: str, b: int) -> None:
    """On numbers of one sign, operators are Python's; by zero there is no value."""
    a, b = abs(a), abs(b)
    said = commands_of(f"r $(({a} {mark} {b}))").commands[0][1:]
    expected = None if mark in "/%" and not b else int(eval(f"{a} {'//' if mark == '/' else mark} {b}"))
    assert expected is None or said == [str(expected)]


COMMANDS = {
    "(( n = 1 << p )); r $n": ["8"], "n=1; (( n <<= p )); (( n++ )); r $n": ["9"],
    "if (( (1 << p) > 4 )); then r a; else r b; fi": ["a"], "(( p - 3 )) || r none": ["none"],
    "for (( i = 0; i < (1 << p); i++ )); do r i; done; r out": ["out"], "((cd x; y) && r z)": ["z"],
}  # fmt: skip


@pytest.mark.parametrize("text", COMMANDS)
def test_double_brackets_compute(text: str) -> None:
    """No sign between them is a redirection or begins a document; what they set is set, and zero is false."""
    assert [said for word, *said in commands_of(f"p=3; {text}").commands if word == "r"] == [COMMANDS[text]]


COUNTED = {
    "N=2; for ((w=0; w<N; w++)); do r $w; done": ["0", "1"],
    "for ((i = 1; i <= 3; i += 1)) ; do r $(( i * 2 )); done": ["2", "4", "6"],
    "B=4; for ((i=B; i<B+2; ++i)); do r $i; done": ["4", "5"],
    "for ((i=3; i<1; i++)); do r $i; done; r out": ["out"],
    "for ((i=0; i<NOBODY; i++)); do r $i; done; r out": ["out"],
    "for ((i=0; i<100000000; i++)); do r $i; done; r out": ["out"],
    "for ((i=9; i>1; i--)); do r $i; done; r out": ["out"],
}


@pytest.mark.parametrize("text", COUNTED)
def test_loops_that_count_run_as_often(text: str) -> None:
    """Bounds are arithmetic; a loop whose bounds are not known, or far apart, is left out and noted."""
    shell = commands_of(text)
    assert [said for word, said in shell.commands if word == "r"] == COUNTED[text]
    assert bool(shell.notes) == any(word in text for word in ("NOBODY", "100000000", "i--"))


def test_a_budget_is_spent_by_all_that_a_script_starts() -> None:
    """Here-documents and functions share the budget of their script."""
    budget = Budget("run.sh", steps=100)
    with pytest.raises(InputError, match="steps"):
        commands_of("f() { a; b; c; }\n" + "f\n" * 50, budget=budget)


def test_loops_run_over_all_words() -> None:
    """No turn is left out in silence."""
    assert len(commands_of("for x in " + "w " * 500 + "; do r $x; done").commands) == 500


def test_the_interpreter_is_importable_alone() -> None:
    """It needs nothing of models, devices or plans."""
    code = "import sys, shardwise.shell._interpreter; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {name.split(".")[1] for name in loaded if name.startswith("shardwise.")} <= {
        "errors",
        "records",
        "shell",
        "_lazy",
        "_version",
    }
