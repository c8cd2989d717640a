"""The buffer and the engines over time."""

from collections.abc import Sequence
from itertools import pairwise

from protocol.watching import Moments
from rollout_service.watch.recent import Moment, View


def moments(view: View) -> Moments:
    """One value a moment for each name, and what is made of two of them: rates and lags."""
    known = view.moments
    names = sorted({name for moment in known for name in moment.values})
    series: dict[str, list[float | None]] = {name: [m.values.get(name) for m in known] for name in names}
    series["tokens_per_s"] = _rates(known, "tokens_generated")
    series["consumed_per_s"] = _rates(known, "consumed")
    series["oldest_lag"] = _lags(series, "oldest_version")
    series["active_lag"] = _lags(series, "active_version")
    return Moments(at=[moment.at for moment in known], series=series if known else {})


def _rates(known: Sequence[Moment], name: str) -> list[float | None]:
    """Growth a second of a count; none where it went back, which a restart does."""
    rates: list[float | None] = [None] if known else []
    for before, after in pairwise(known):
        earlier, later = before.values.get(name), after.values.get(name)
        took_s = after.at - before.at
        if earlier is None or later is None or later < earlier or took_s <= 0:
            rates.append(None)
        else:
            rates.append(round((later - earlier) / took_s, 3))
    return rates


def _lags(series: dict[str, list[float | None]], name: str) -> list[float | None]:
    """Versions behind the newest one."""
    newest, versions = series.get("newest_version", []), series.get(name, [])
    pairs = zip(newest, versions, strict=False)
    return [None if new is None or old is None else new - old for new, old in pairs] or [None] * len(newest)
