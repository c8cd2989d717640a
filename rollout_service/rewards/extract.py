"""Where in a response the answer stands."""

import re
from functools import lru_cache

ANSWER_TAG = r"<answer>\s*(.*?)\s*</answer>"


def extract_answer(response: str, pattern: str | None) -> str:
    """The answer in a response: the last match of `pattern`, else of an `<answer>` tag, else the whole response.

    With a `pattern` of your own nothing else is tried: a response without a match has the empty answer. A group in the
    pattern, if there is one, is the answer; otherwise the whole match is.
    """
    matches = list(_compile(pattern or ANSWER_TAG).finditer(response))
    if matches:
        return (matches[-1].group(1 if matches[-1].re.groups else 0) or "").strip()
    return "" if pattern else response.strip()


@lru_cache(maxsize=16)
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)
