"""Text of single tokens, and of characters that can't be seen."""

from collections.abc import Callable, Sequence

HALF = "\N{REPLACEMENT CHARACTER}"
KEPT = 6  # tokens before, whose text a token may change: a character has four bytes, a space goes with its word
LONGEST = 32  # tokens that are decoded together, so that the work grows with the response and not with its square
# Marks that turn the direction of the text around them, and would make a page say what it doesn't, and C1 controls.
TURNING = (*range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0x80, 0xA0))
CONTROLS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
SYMBOLS = CONTROLS | dict.fromkeys(TURNING, ord(HALF))


def visible(text: str) -> str:
    """With a symbol for every control character but line breaks and tabs."""
    return text.translate(SYMBOLS)


def token_texts(tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """What each token adds to the text: half a character is �, and a token that adds nothing is shown by its number."""
    texts: list[str] = []
    window: list[int] = []
    before = ""
    for token in tokens:
        if len(window) >= LONGEST:
            window = window[-KEPT:]
            before = decode(window)
        window.append(token)
        after = decode(window)
        texts.append(_added(before, after) or f"⟨{token}⟩")
        before = after
    return [visible(text) for text in texts]


def _added(before: str, after: str) -> str:
    if after.startswith(before):
        added = after[len(before) :]
        return added or (HALF if after.endswith(HALF) else "")
    whole = before.rstrip(HALF)
    return after[len(whole) :] if after.startswith(whole) else after[-1:]
