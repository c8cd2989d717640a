"""The numbers of a run as its report shows them: in words, with units, a metric's first and last value together."""

from collections.abc import Callable, Mapping

FIRST, LAST = " (first)", " (last)"


def count_text(value: float) -> str:
    """12345 → 12,345."""
    return f"{value:,.0f}"


def number_text(value: float) -> str:
    """Three digits, and no decimals where the number is large."""
    return count_text(value) if abs(value) >= 999.5 else f"{value:.3g}"


def share_text(value: float) -> str:
    """A share of 1 in percent."""
    return f"{number_text(100 * value)} %"


def duration_text(value: float) -> str:
    """As the page's script writes durations (`static/format.js`)."""
    seconds = max(0.0, value)
    if seconds < 0.9995:
        return f"{round(1000 * seconds)} ms" if seconds >= 5e-4 else "0 s"
    if seconds < 59.5:
        return f"{seconds:.0f} s" if seconds >= 9.95 else f"{round(seconds, 1):g} s"
    minutes, rest = divmod(int(max(60.0, seconds)), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


SHOWN: dict[str, tuple[str, Callable[[float], str]]] = {
    "duration_s": ("Duration", duration_text),
    "num_rounds": ("Rounds", count_text),
    "num_steps": ("Trained steps", count_text),
    "num_responses": ("Responses", count_text),
    "num_resumes": ("Resumes", count_text),
    "num_failed": ("Failed responses", count_text),
    "num_tokens": ("Tokens generated", count_text),
    "tokens_per_s": ("Tokens/s", count_text),
    "bubble_share": ("Idle slots", share_text),
    "tail_s": ("After 90 % of a batch", duration_text),
    "reward/mean": ("Reward", number_text),
    "eval/reward": ("Held-out reward", number_text),
    "off_policy/token_share": ("Off-policy tokens", share_text),
    "importance/ess": ("Effective sample size", share_text),
    "response/length_mean": ("Response length", number_text),
}


def facts_shown(facts: Mapping[str, float]) -> list[tuple[str, str]]:
    """(label, text) of each number; a name that isn't known here is shown as it is."""
    shown: list[tuple[str, str]] = []
    for name, value in facts.items():
        metric = name.removesuffix(FIRST).removesuffix(LAST)
        label, text = SHOWN.get(metric, (metric.replace("_", " "), number_text))
        if name.endswith(LAST) and f"{metric}{FIRST}" in facts:
            continue  # it was shown with the first
        last = facts.get(f"{metric}{LAST}") if name.endswith(FIRST) else None
        shown.append((label, text(value) if last is None else f"{text(value)} → {text(last)}"))
    return shown
