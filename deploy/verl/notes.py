"""What of a script is not carried besides single parameters: where a shell would decide, and overrides elsewhere.

Always true: each note has the line, what stands there, and why it does not count; whatever looks like an override and
is not among those of the command that is translated is in a note.
"""

import re
from collections.abc import Iterator, Sequence

from deploy.verl.overrides import KEY
from deploy.verl.shell import Note, Word

INNER = re.compile(r"(?:^|\s)[+~]{0,2}[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+=\S")  # an override within a text
GROUP = re.compile(r"[+~]{0,2}[A-Za-z_][\w/]*(?:@[\w.]+)?=")  # a choice of a group of configuration, such as data=mine
CONFIG = re.compile(r"(--config-(name|path|dir)|-c[np])(=|$)")
MAX_SHOWN_CHARS = 60

BRANCH = "branches are not followed: each line in it counts once, in the order of the file"
LOOP = "loops are not followed: what is in it counts once, and its variable is not known"
GUARD = "whether this holds is not known: what it guards counts"
KEYWORDS = {
    **dict.fromkeys(("if", "case"), BRANCH),
    "function": "its body counts once, where it stands, and without arguments",
    **dict.fromkeys(("for", "while", "until", "select"), LOOP),
    **dict.fromkeys(("[", "[[", "test"), GUARD),
}
ELSEWHERE = "stands in another command than the one that is translated, which has the most overrides"
QUOTED = "overrides within a text that is passed on as one word are not read: write them as words"


def find_notes(commands: Sequence[Sequence[Word]], chosen: Sequence[Word]) -> list[Note]:
    """Notes on all commands; `chosen` is the one that is translated."""
    found: list[Note] = []
    for words in commands:
        if words and words[0].text in KEYWORDS:
            found.append(Note(words[0].line, _shown(" ".join(w.text for w in words)), KEYWORDS[words[0].text]))
        found += _of_chosen(words) if words is chosen else _of_other(words)
    return found


def _of_chosen(words: Sequence[Word]) -> Iterator[Note]:
    options = False  # whether the module has been named, or an override: what is before may set the environment
    for place, word in enumerate(words):
        is_override = KEY.match(word.text.removeprefix("--")) is not None
        options = options or is_override or word.text == "-m"
        if CONFIG.match(word.text):
            named = [word.text] if "=" in word.text else [w.text for w in words[place : place + 2]]
            yield Note(word.line, _shown(" ".join(named)), "the values of that file are not read: set them in RUN.toml")
        elif options and not is_override and GROUP.match(word.text):
            yield Note(word.line, _shown(word.text), "chooses a part of verl's own configuration, which is not read")
        elif not is_override and INNER.search(word.text):
            yield Note(word.line, _shown(word.text), QUOTED)


def _of_other(words: Sequence[Word]) -> Iterator[Note]:
    for word in words:
        match = KEY.match(word.text.removeprefix("--"))
        if match is not None and match["equals"]:
            yield Note(word.line, _shown(word.text), ELSEWHERE)
        elif INNER.search(word.text):
            yield Note(word.line, _shown(word.text), QUOTED)


def _shown(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"
