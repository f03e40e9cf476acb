"""What a launch script would run: variables, arrays, defaults, arithmetic and conditions, without running anything.

A variable that the script does not set stays as "${NAME}", so that whoever reads the words can say what is missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.errors import cut
from shardwise.shell._arithmetic import matches, test, value_of
from shardwise.shell._lexer import Budget, Word, whole_of
from shardwise.shell._parser import CaseCommand, If, Loop, ShellNode, Simple, parsed
from shardwise.shell._words import WORD

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[\w+\])?(\+?)=", re.ASCII)
_NESTED = r"(?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))*"  # brackets of three levels
_BRACED = r"(?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*"  # of four levels with its own
_VARIABLE = re.compile(
    rf"\\\$|\$\(\({_NESTED}\)\)|\$\({_NESTED}\)|`[^`]*`|\$\{{{_BRACED}\}}|\$\w+|\$[@#*?$!]",
    re.ASCII,
)
# A word of what a variable holds; what is open, such as $((A + B)), is one.
_PIECE = re.compile(rf"(?:\$\({_NESTED}\)|\S)+")
_DEFAULT = re.compile(r"(\w+|@)(?:\[([@*]|\d{1,9})\])?(?:(:?[-=+?])(.*))?", re.DOTALL | re.ASCII)
_CUT = re.compile(r"(\w+)(##?|%%?)(.*)", re.DOTALL | re.ASCII)
_SET = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:(\+\+|--)\s*|(<<|>>|[-+*/%&|^])?=(?!=)(.*))", re.DOTALL | re.ASCII)
_MOST_ROUNDS = 256
_KEEPS = ("export", "local", "declare", "readonly", "typeset")


@dataclass(slots=True)
class Shell:
    """The state of a script: variables, arrays, and what it has run so far."""

    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    functions: dict[str, list[ShellNode]] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)
    unset: dict[str, None] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    documents: list[str] = field(default_factory=list)
    budget: Budget = field(default_factory=Budget)

    def inside(self, document: str) -> list[list[str]]:
        """Return what a here-document would run, were it a script."""
        self.budget.spend(len(self.variables) + sum(map(len, self.arrays.values())))
        arrays = {name: list(items) for name, items in self.arrays.items()}
        inner = Shell(dict(self.variables), arrays, budget=self.budget)
        inner.run(parsed(self.expand(document), self.budget)[0])
        return inner.commands

    def value(self, name: str) -> str | None:
        """Return the value of a variable, or None where it is not set."""
        if name in self.variables:
            return self.variables[name]
        items = self.arrays.get(name)
        return items[0] if items else None

    def note(self, text: str) -> None:
        """Record something that was assumed."""
        self.notes.setdefault(cut(text))

    def words(self, word: Word) -> list[str]:
        """Return the words that one word expands to."""
        fields = self._words(word)
        self.budget.spend(len(fields))
        return fields

    def _words(self, word: Word) -> list[str]:
        if len(word.pieces) == 1 and (whole := self._array(word.pieces[0][1])) is not None:
            return whole if word.pieces[0][0] == "double" else " ".join(whole).split()
        fields, current, started = [], "", False
        for quote, text in word.pieces:
            if quote != "bare":
                current += text if quote == "single" else self.expand(text)
                started = True
                continue
            expanded = self.expand(text)
            parts = _PIECE.findall(expanded) if "$" in text or "`" in text else [expanded]
            if expanded[:1].isspace() and current:
                fields.append(current)
                current = ""
            for i, part in enumerate(parts):
                if i:
                    fields.append(current)
                    current = ""
                current += part
                started = started or bool(part)
        return [*fields, current] if started or current else fields

    def _array(self, text: str) -> list[str] | None:
        """Return the items of "${NAME[@]}" and "$@", where the text is that alone."""
        match = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}|\$@|\$\*|\$\{@\}", text)
        if match is None:
            return None
        if match[1] is None:
            return self.arrays.get("@", [])
        if match[1] in self.arrays:
            return self.arrays[match[1]]
        value = self.variables.get(match[1])
        return [value] if value is not None else self._missing(match[1]).split()

    def expand(self, text: str) -> str:
        """Return a text with its variables put in."""
        with self.budget.deeper():
            return _VARIABLE.sub(lambda match: self.budget.made(self._one(match[0])), self.budget.made(text))

    def _one(self, text: str) -> str:
        if text == "\\$":
            return "$"
        if text.startswith("$((") and text.endswith("))"):
            return self.arithmetic(text[3:-2])
        if text[0] == "`" or text.startswith("$("):
            return self._command(text)
        if text.startswith("${#"):
            return str(len(self.arrays.get(re.sub(r"\W|\[.*", "", text[3:-1]), [])))
        return self._variable(text[2:-1] if text.startswith("${") else text[1:])

    def _variable(self, inside: str) -> str:
        match, cut_off = _DEFAULT.fullmatch(inside), _CUT.fullmatch(inside)
        if cut_off and (default := self.value(cut_off[1])) is not None:
            return self._cut(default, cut_off[2], self.expand(cut_off[3]))
        if inside in ("@", "*"):
            return " ".join(self.arrays.get("@", []))
        if inside in ("?", "$", "!", "#"):
            return {"#": str(len(self.arrays.get("@", [])))}.get(inside, "0")
        if match is None:
            return self._missing(inside)
        name, index, mark, other = match.groups()
        if index and name in self.arrays:
            items = self.arrays[name]
            if index in "@*":
                self.budget.spend(len(items))
                return " ".join(items)
            return "".join(items[int(index) : int(index) + 1])
        value = self.value(name)
        if mark and mark[-1] == "+":
            return self.expand(other) if value else ""
        if value is not None and (value or not mark or mark[0] != ":"):
            return value
        if mark and mark[-1] in "-=":
            return self._default(name, mark, self.expand(other.strip('"').strip("'")))
        return self._missing(name)

    def _cut(self, text: str, mark: str, pattern: str) -> str:
        """Return a text without the shortest part of a pattern at an end, the longest where the mark stands twice."""
        first, ends = mark[0] == "#", range(len(text) + 1)
        for size in ends if len(mark) == 1 else reversed(ends):
            at = size if first else len(text) - size
            if matches(text[:at] if first else text[at:], pattern, self.budget):
                return text[at:] if first else text[:at]
        return text

    def _default(self, name: str, mark: str, value: str) -> str:
        if mark[-1] == "=":
            self.variables[name] = value
        return value

    def _missing(self, name: str) -> str:
        name = name if (plainer := _CUT.fullmatch(name)) is None else plainer[1]
        self.unset.setdefault(name)
        return "${" + name + "}"

    def arithmetic(self, text: str) -> str:
        """Return the value of an arithmetic expression, or the text of it where something in it is not known."""
        expanded = self.expand(text)
        if changed := _SET.fullmatch(expanded):
            name, step, mark, rest = changed.groups()
            rest = f"{name} {step[0]} 1" if step else f"{name} {mark} ({rest})" if mark else rest
            before, self.variables[name] = self.value(name), self.budget.made(self.arithmetic(rest))
            return self.arithmetic(before or "0") if step else self.variables[name]
        value = value_of(expanded, self._known_name)
        if value is not None:
            return str(value)
        return "$((" + WORD.sub(lambda one: self._known_name(one[0]) or one[0], expanded) + "))"

    def _known_name(self, name: str) -> str | None:
        value = self.value(name)
        if value is None:
            self._missing(name)
        return None if value is None or "$" in value else value

    def _command(self, text: str) -> str:
        """Return what a command would print where that is plain; otherwise the command itself."""
        inside = text[1:-1] if text[0] == "`" else text[2:-1]
        words = inside.split()
        if words[:1] == ["expr"]:
            return self.arithmetic(inside.strip()[4:].replace("\\*", "*"))
        if words[:1] == ["echo"] and not set(inside) & set("|;&<>"):
            return self.expand(inside.strip()[4:].strip().strip('"'))
        return text if text.startswith("$(") else f"$({inside})"

    def run(self, nodes: Sequence[ShellNode]) -> None:
        """Run commands one after the other."""
        with self.budget.deeper():
            self._run(nodes)

    def _run(self, nodes: Sequence[ShellNode]) -> None:
        truth = True
        for node in nodes:
            self.budget.spend()
            if isinstance(node, Simple):
                if (node.after == "&&" and not truth) or (node.after == "||" and truth):
                    continue
                truth = self._simple(node)
            elif isinstance(node, If):
                self._if(node)
            elif isinstance(node, Loop):
                self._loop(node)
            elif isinstance(node, CaseCommand):
                self._case(node)
            else:
                self.functions[node.name] = node.body

    def _if(self, node: If) -> None:
        for condition, body in node.branches:
            if not condition or self.holds(condition):
                self.run(body)
                return

    def _loop(self, node: Loop) -> None:
        if not node.name:
            self.note("a loop over no list of words is left out of the script")
            return
        words = self._counted(node) if node.bounds[0] else [w for one in node.words for w in self.words(one)]
        for word in words:
            self.budget.spend()
            self.variables[node.name] = word
            self.run(node.body)

    def _counted(self, node: Loop) -> list[str]:
        """Return the numbers that a loop counts, none where a bound is not known or they are many."""
        first, past = (self.arithmetic(bound.strip()) for bound in node.bounds)
        low, high = whole_of(first), whole_of(past)
        if low is None or high is None or high - low > _MOST_ROUNDS:
            self.note(f"a loop of {node.name} from {first} to below {past} is left out of the script")
            return []
        return [str(number) for number in range(low, high)]

    def _case(self, node: CaseCommand) -> None:
        text = self._known(node.word)
        for patterns, body in node.arms:
            if any(matches(text, self._known(p), self.budget) for p in patterns):
                self.run(body)
                return

    def _known(self, word: Word) -> str:
        """Return a word in one piece, what is not set being empty, as the shell has it."""
        text = "".join(piece if quote == "single" else self.expand(piece) for quote, piece in word.pieces)
        return re.sub(r"\$\{\w+\}", "", text, flags=re.ASCII)

    def holds(self, nodes: Sequence[ShellNode]) -> bool:
        """Return whether a condition is true; one that is not a test counts as false, and is noted."""
        truth = False
        for node in nodes:
            self.budget.spend()
            if not isinstance(node, Simple) or not node.words:
                continue
            if (node.after == "&&" and not truth) or (node.after == "||" and truth):
                continue
            words = [self._known(w) for w in node.words]
            negated = words[0] == "!"
            words = words[1:] if negated else words
            if words[:1] == ["(("] and whole_of(words[-1].lstrip("-")) is not None:
                truth = (words[-1] != "0") != negated
                continue
            if not words or words[0] not in ("[", "[[", "test"):
                self.note(f"the condition {' '.join(words)!r} of the script is taken as false")
                truth = False
                continue
            truth = test([w for w in words[1:] if w not in ("]", "]]")], self.budget) != negated
        return truth

    def _simple(self, node: Simple) -> bool:
        words = list(node.words)
        if words and words[0].bare in ("[", "[[", "(("):
            return self.holds([Simple(words)])
        if words and words[0].bare in _KEEPS:
            words = [w for w in words[1:] if not w.bare.startswith("-")]
        while words and _ASSIGNMENT.match(words[0].text) and words[0].pieces[0][0] == "bare":
            self._assign(words.pop(0))
        if not words or node.words[0].bare in _KEEPS:
            return True
        fields = [text for word in words for text in self.words(word)]
        if fields and fields[0] in self.functions:
            outside = self.arrays.get("@", [])
            self._pass(fields[1:])
            self.run(self.functions[fields[0]])
            self._pass(outside)
        elif fields and fields[0] == "eval":
            self.run(parsed(" ".join(fields[1:]), self.budget)[0])
        elif fields and fields[0] in ("source", "."):
            self.note(f"{' '.join(fields)} of the script is not read")
        elif fields:
            self.commands.append(fields)
        return True

    def _pass(self, words: list[str]) -> None:
        """Put words behind a script or a function in place of those before them."""
        for i in range(1, len(self.arrays.get("@", [])) + 1):
            self.variables.pop(str(i), None)
        self.arrays["@"] = words
        self.variables |= {str(i): word for i, word in enumerate(words, 1)}

    def _assign(self, word: Word) -> None:
        match = _ASSIGNMENT.match(word.text)
        if match is None:
            return
        name, more = match[1], bool(match[2])
        if word.items is not None:
            items = [text for item in word.items for text in self.words(item)]
            self.budget.spend(len(self.arrays.get(name, [])))
            self.arrays[name] = [*(self.arrays.get(name, []) if more else []), *items]
            self.variables.pop(name, None)
            return
        quote, text = word.pieces[0]
        rest = [(quote, text[match.end() :]), *word.pieces[1:]]
        value = "".join(piece if q == "single" else self.expand(piece) for q, piece in rest)
        self.variables[name] = self.budget.made(self.variables.get(name, "") + value) if more else value
        self.arrays.pop(name, None)


def commands_of(text: str, variables: Mapping[str, str] | None = None, budget: Budget | None = None) -> Shell:
    """Return the state of a script at its end, with every command it would have run.

    Variables named by numbers are the words behind the script. Raises `InputError` beyond the budget.

    >>> commands_of('A=(--x 2); B="${C:-8}"; run "${A[@]}" $B $((B*2))').commands
    [['run', '--x', '2', '8', '16']]
    """
    shell = Shell(variables=dict(variables or {}), budget=budget or Budget())
    shell.arrays["@"] = []
    shell.variables |= _slurm(text)
    nodes, shell.documents = parsed(text, shell.budget, whole=True)
    shell.run(nodes)
    return shell


def _slurm(text: str) -> dict[str, str]:
    """Return the variables that Slurm sets from the directives of a script."""
    names = {
        "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        "N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
        "gpus-per-node": ("SLURM_GPUS_PER_NODE",),
        "gres": ("SLURM_GPUS_PER_NODE",),
        "ntasks": ("SLURM_NTASKS",),
    }
    directives: dict[str, str] = {}
    for line in re.findall(r"^#SBATCH\s+(.*)$", text, re.MULTILINE):
        for key, value in re.findall(r"(?:^|\s)--?([\w-]+)[= ]+([^\s-]\S*)", line):
            number = value.rpartition(":")[2]
            if whole_of(number) is not None:
                directives |= dict.fromkeys(names.get(key, ()), number)
    return directives
