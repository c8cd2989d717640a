"""Sections on a terminal of any size, or as plain text.

Always true: the screen never has more lines than the terminal, nor wider ones; what doesn't fit is left out from the
end of each section first, and whole sections go from the last to the first.
"""

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.text import Text

from deploy.top.drawing import UNICODE, Glyphs, duration
from deploy.top.sections import BAD, DIM, STRONG, WARN, Section, sections
from deploy.top.seen import Seen

LABEL_WIDTH = 9
FRESH_S = 5.0  # a status that is older than this is said to be; events come once a second
MIN_WIDTH = 40  # below this nothing is readable, and lines are cut


class Screen:
    """A rich renderable that fills the terminal as it is at that moment."""

    def __init__(self, seen: Seen, where: str, now: float, glyphs: Glyphs, keys: str = "", note: str = "") -> None:
        self._seen = seen
        self._where = where
        self._now = now
        self._glyphs = glyphs
        self._keys = keys
        self._note = note

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The lines, each exactly as wide as the terminal at the most."""
        lines = self.lines(options.max_width, options.height or options.size.height)
        for number, line in enumerate(lines):
            ascii_only = self._glyphs is not UNICODE
            shown = Text(self._glyphs.plain(line.plain)) if ascii_only else line
            shown.truncate(options.max_width, overflow="crop" if ascii_only else "ellipsis")
            yield from shown.render(console)
            if number < len(lines) - 1:
                yield Segment.line()

    def lines(self, width: int, height: int) -> list[Text]:
        """At most `height` lines."""
        head = [title(self._seen, self._where, self._now), *away(self._seen, self._now)]
        foot = [Text(self._note or self._keys, style=WARN if self._note else DIM)] if self._keys else []
        room = max(0, height - len(head) - len(foot))
        inner = max(MIN_WIDTH, width) - LABEL_WIDTH
        body = laid_out(sections(self._seen, self._now, inner, self._glyphs), room)
        body += [Text()] * (room - len(body)) if foot else []
        return [*head, *body, *foot][:height]


def title(seen: Seen, where: str, now: float) -> Text:
    """Who this is, and whether the numbers are of now."""
    text = Text("april top", style=STRONG)
    status = seen.status
    if status is not None:
        text.append(f"  {status.run}  up {duration(status.uptime_s)}  epoch {status.service_epoch}", style="")
    text.append(f"  {where}", style=DIM)
    if seen.away_since is None and status is not None and now - seen.status_at > FRESH_S:
        text.append(f"  {duration(now - seen.status_at)} old", style=WARN)
    return text


def away(seen: Seen, now: float) -> list[Text]:
    """A line that says since when there is no status, and why, if so."""
    if seen.away_since is None:
        return []
    old = ", what follows is its last status" if seen.status is not None else ""
    return [Text(f"AWAY for {duration(now - seen.away_since)}{old}: {seen.away_why}", style=BAD)]


def laid_out(made: Sequence[Section], height: int) -> list[Text]:
    """The sections one under the other in `height` lines: all get their least, then more, the first ones first."""
    given = [0] * len(made)
    room = height
    for wanted in (_least, _without_growth, _all):
        for place, section in enumerate(made):
            more = min(room, max(0, wanted(section) - given[place]))
            given[place] += more
            room -= more
    return [
        _labelled(section.label if number == 0 else "", line)
        for section, count in zip(made, given, strict=True)
        for number, line in enumerate(section.lines[:count])
    ]


def _least(section: Section) -> int:
    return min(section.least, len(section.lines))


def _without_growth(section: Section) -> int:
    return 0 if section.grows else len(section.lines)


def _all(section: Section) -> int:
    return len(section.lines)


def _labelled(label: str, line: Text) -> Text:
    text = Text(f"{label:<{LABEL_WIDTH - 1}.{LABEL_WIDTH - 1}} ", style="")
    text.stylize(DIM)
    text.append_text(line)
    return text


def plain_text(seen: Seen, where: str, now: float, width: int, glyphs: Glyphs) -> str:
    """A snapshot as text: every line whole, however long, and no colour."""
    made = sections(seen, now, width - LABEL_WIDTH, glyphs)
    body = laid_out(made, sum(len(section.lines) for section in made))
    lines = [title(seen, where, now), *away(seen, now), *body]
    return "\n".join(glyphs.plain(line.plain.rstrip()) for line in lines) + "\n"
