"""A launch script's commands and words, found by reading it: nothing is ever executed.

Always true: quotes, line continuations, comments, variables set earlier, `${NAME:-default}`, arrays and integer
arithmetic come out as a POSIX shell would give them; what only running would tell (`$(command)`, a variable that
nothing sets) stays in the word as it was written and is named in `Word.unknown`. Branches and loops are not followed:
every line counts once, in the order of the file.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from protocol.errors import DataError

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
EXPANSION = re.compile(r"([A-Za-z_][A-Za-z0-9_]*|[0-9@*#?!$-])(\[[@*]\])?(?::?([-=+?])(.*))?$", re.DOTALL)
HEREDOC = re.compile(r"<<-?\s*(['\"]?)([A-Za-z_][A-Za-z0-9_]*)\1")
FUNCTION = re.compile(r"\(\s*\)")
OVERRIDE = re.compile(r"(?:^|\s)[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+=")
ENDS_EARLY = "a blank after the backslash ends the command there, and what follows is another one: remove the blank"
DOS_LINES = "lines end as DOS ends them (CRLF): a shell would end the command here; it is read as if they ended in LF"
ARGUMENTS = frozenset("@*123456789")  # what the script was started with: nothing, here
SEPARATORS = frozenset("\n;&|()")
PREFIXES = frozenset({"export", "local", "readonly", "declare", "typeset"})
OPENERS = frozenset({"then", "else", "do", "{", "!"})  # a command begins after them
BLANK_REST = re.compile(r"[ \t]+(?=\n|$)")
OPERATORS: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command; `unknown` names what is in it that only running the script would tell."""

    text: str
    unknown: tuple[str, ...] = ()
    line: int = 0


@dataclass(frozen=True, slots=True)
class Note:
    """`text`, on `line`, is not read as a shell would; `reason` says how."""

    line: int
    text: str
    reason: str


Variables = dict[str, list[Word]]  # an array has several, an ordinary variable one


@dataclass(slots=True)
class _Builder:
    """The word that is being read, and the words before it."""

    words: list[Word] = field(default_factory=list[Word])
    text: str = ""
    unknown: tuple[str, ...] = ()
    begun: bool = False
    line: int = 1

    def add(self, text: str, unknown: tuple[str, ...] = ()) -> None:
        self.text += text
        self.unknown += unknown
        self.begun = True

    def end(self) -> None:
        if self.begun:
            self.words.append(Word(self.text, self.unknown, self.line))
        self.text, self.unknown, self.begun = "", (), False


def read_script(text: str, environment: Mapping[str, str]) -> list[list[Word]]:
    """The commands of a script, each a list of words after expansion; `environment` has what is set before it."""
    return read_with_notes(text, environment)[0]


def read_with_notes(text: str, environment: Mapping[str, str]) -> tuple[list[list[Word]], list[Note]]:
    """The same, with notes on functions, continuations that end early, and here-documents with overrides."""
    known = {name: [Word(value)] for name, value in environment.items()}
    reader = _Reader(text.replace("\r\n", "\n"), known)
    commands = reader.commands()
    continued = text.find("\\\r\n")
    if continued >= 0:
        number = text.count("\n", 0, continued)
        reader.notes.append(Note(number + 1, text.splitlines()[number].strip(), DOS_LINES))
    return commands, reader.notes


class _Reader:
    """Reads from `at` on; what a command assigns is known to those after it."""

    def __init__(self, text: str, variables: Variables) -> None:
        self.text = text
        self.variables = variables
        self.at = 0
        self.heredocs: list[str] = []
        self.notes: list[Note] = []

    def commands(self) -> list[list[Word]]:
        """All of them."""
        found: list[list[Word]] = []
        while self.at < len(self.text):
            words = self._command()
            if words:
                found.append(words)
        return found

    def _command(self) -> list[Word]:
        """Up to the next separator; assignments in front of it are carried out and left out."""
        builder = _Builder(line=self._line())
        while self.at < len(self.text):
            here = self.text[self.at]
            if here in SEPARATORS:
                self._note_function(builder)
                self.at += 1
                if here == "\n":
                    self._skip_heredocs()
                break
            if not builder.begun:
                builder.line = self._line()
                if self._assignment(builder.words):
                    continue
            self._step(here, builder)
        builder.end()
        return builder.words

    def _step(self, here: str, builder: _Builder) -> None:
        """Read one piece of a word, or what is between two."""
        if here in " \t":
            self.at += 1
            builder.end()
        elif here == "#" and not builder.begun:
            self.at = self._find("\n")
        elif here == "\\":
            following = self.text[self.at + 1 : self.at + 2]
            if BLANK_REST.match(self.text, self.at + 1):
                self._note(ENDS_EARLY)
            self.at += 2
            if following != "\n":
                builder.add(following)
        elif here == "'":
            end = self._find("'", self.at + 1, must=True)
            builder.add(self.text[self.at + 1 : end])
            self.at = end + 1
        elif here == '"':
            self._double_quoted(builder)
        elif here in "$`":
            self._expand(builder, quoted=False)
        elif here == "<" and (match := HEREDOC.match(self.text, self.at)):
            self.heredocs.append(match[2])
            self.at = match.end()
        else:
            builder.add(here)
            self.at += 1

    def _double_quoted(self, builder: _Builder) -> None:
        start, self.at = self.at, self.at + 1
        builder.add("")
        while self.at < len(self.text):
            here = self.text[self.at]
            if here == '"':
                self.at += 1
                return
            if here == "\\" and self.text[self.at + 1 : self.at + 2] in tuple('$`"\\\n'):
                builder.add(self.text[self.at + 1].replace("\n", ""))
                self.at += 2
            elif here in "$`":
                self._expand(builder, quoted=True)
            else:
                builder.add(here)
                self.at += 1
        raise DataError(f"line {self._line(start)}: a double quote is never closed; is this a shell script?")

    def _assignment(self, words: list[Word]) -> bool:
        """Carry out `NAME=value` or `NAME=(…)` if one begins here, in front of a command or after `export`."""
        match = ASSIGNMENT.match(self.text, self.at)
        if match is None or any(w.text not in PREFIXES | OPENERS and not w.text.startswith("-") for w in words):
            return False
        self.at = match.end()
        if self.text[self.at : self.at + 1] == "(":
            self.at += 1
            values = self._array()
        else:
            values = self._value()
        before = self.variables.get(match[1], []) if match[2] else []
        if match[2] and before and len(values) == len(before) == 1:
            values = [Word(before[0].text + values[0].text, before[0].unknown + values[0].unknown)]
            before = []
        self.variables[match[1]] = before + values
        return True

    def _value(self) -> list[Word]:
        builder = _Builder(line=self._line())
        builder.add("")
        while self.at < len(self.text) and self.text[self.at] not in " \t" and self.text[self.at] not in SEPARATORS:
            self._step(self.text[self.at], builder)
        builder.end()
        # An assignment does not split what it expands.
        unknown = tuple(name for word in builder.words for name in word.unknown)
        return [Word(" ".join(word.text for word in builder.words), unknown)]

    def _array(self) -> list[Word]:
        builder = _Builder()
        while self.at < len(self.text) and self.text[self.at] != ")":
            if not builder.begun:
                builder.line = self._line()
            if self.text[self.at] == "\n":
                builder.end()
                self.at += 1
            else:
                self._step(self.text[self.at], builder)
        self.at += 1
        builder.end()
        return builder.words

    def _expand(self, builder: _Builder, quoted: bool) -> None:
        """Replace what begins with `$` or a backquote here."""
        start = self.at
        rest = self.text[start:]
        if rest.startswith("$(("):
            end = self._find("))", start, must=True) + 2
            values = [self._arithmetic(self.text[start:end])]
        elif rest.startswith("$("):
            end = self._closing(start + 1, "(", ")")
            values = [self._unknown(start, end)]
        elif rest.startswith("`"):
            end = self._find("`", start + 1, must=True) + 1
            values = [self._unknown(start, end)]
        elif rest.startswith("${"):
            end = self._closing(start + 1, "{", "}")
            values = self._parameter(self.text[start + 2 : end - 1], self.text[start:end])
        else:
            name = NAME.match(self.text, start + 1)
            end = name.end() if name else start + 2
            written = self.text[start:end]
            values = self._parameter(written[1:], written) if len(written) > 1 else [Word("$")]
        self.at = end
        _insert(builder, values, quoted)

    def _parameter(self, inside: str, written: str) -> list[Word]:
        """`NAME`, `NAME[@]`, and the forms with a default."""
        match = EXPANSION.match(inside)
        if match is None:
            return [Word(written, (written,))]
        name, _, form, other = match.groups()
        known = self.variables.get(name, [] if name in ARGUMENTS else None)
        known_text = bool(known) and any(word.text for word in known or ())
        if form == "+":
            return [self._inner(other)] if known_text else []
        if form in ("-", "=") and not known_text:
            value = self._inner(other)
            if form == "=":
                self.variables[name] = [value]
            return [value]
        return [Word(written, (written,))] if known is None else known

    def _inner(self, text: str) -> Word:
        reader = _Reader(text, self.variables)
        builder = _Builder()
        builder.add("")
        while reader.at < len(text):
            here = text[reader.at]
            if here in " \t\n#" or here in SEPARATORS:
                builder.add(here)
                reader.at += 1
            else:
                reader._step(here, builder)
        builder.end()
        unknown = tuple(name for word in builder.words for name in word.unknown)
        return Word(" ".join(word.text for word in builder.words), unknown)

    def _arithmetic(self, written: str) -> Word:
        """`$((…))` over integers: + - * / % and parentheses."""
        inner = self._inner(written[3:-2])
        named = NAME.sub(lambda match: self._number(match[0]), inner.text)
        try:
            return Word(str(_evaluate(ast.parse(named.replace("/", "//").strip(), mode="eval").body)))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return Word(written, (written,))

    def _number(self, name: str) -> str:
        words = self.variables.get(name)
        return words[0].text if words and len(words) == 1 else name

    def _unknown(self, start: int, end: int) -> Word:
        written = self.text[start:end]
        return Word(written, (written,))

    def _closing(self, start: int, opening: str, closing: str) -> int:
        """The place after the bracket that closes the one at `start`."""
        depth = 0
        for place in range(start, len(self.text)):
            depth += (self.text[place] == opening) - (self.text[place] == closing)
            if not depth:
                return place + 1
        raise DataError(f"line {self._line(start)}: {opening!r} is never closed; is this a shell script?")

    def _find(self, mark: str, start: int | None = None, must: bool = False) -> int:
        found = self.text.find(mark, self.at if start is None else start)
        if found < 0 and must:
            raise DataError(f"line {self._line()}: {mark!r} is missing after it; is this a shell script?")
        return found if found >= 0 else len(self.text)

    def _skip_heredocs(self) -> None:
        for mark in self.heredocs:
            while self.at < len(self.text):
                end = self._find("\n")
                line = self.text[self.at : end].strip()
                if line == mark:
                    self.at = end + 1
                    break
                if OVERRIDE.search(line):
                    self._note("a here-document is not read")
                self.at = end + 1
        self.heredocs.clear()

    def _note_function(self, builder: _Builder) -> None:
        """Before a separator: `name()` begins a function."""
        name = builder.text if not builder.words else builder.words[0].text
        if FUNCTION.match(self.text, self.at) and NAME.fullmatch(name):
            self._note(f"the body of {name} counts once, where it stands, and without arguments")

    def _note(self, reason: str) -> None:
        """On the line that is being read."""
        begin = self.text.rfind("\n", 0, self.at) + 1
        self.notes.append(Note(self._line(), self.text[begin : self._find("\n")].strip(), reason))

    def _line(self, place: int | None = None) -> int:
        return self.text.count("\n", 0, self.at if place is None else place) + 1


def _insert(builder: _Builder, values: list[Word], quoted: bool) -> None:
    """Add expanded words to the one being read: an array makes several, an unquoted one is split at blanks."""
    for number, value in enumerate(values):
        if number:
            builder.end()
        if quoted or value.unknown:
            builder.add(value.text, value.unknown)
            continue
        if value.text[:1].isspace():
            builder.end()
        for place, part in enumerate(value.text.split()):
            if place:
                builder.end()
            builder.add(part)
        if value.text[-1:].isspace():
            builder.end()


def _evaluate(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise ValueError("not integer arithmetic")
