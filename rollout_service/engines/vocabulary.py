"""How many token ids a model's folder knows, read without loading anything of the model."""

import json
from pathlib import Path

CONFIG_NAME = "config.json"  # of a Hugging Face model's folder


def known_tokens(model: Path | None, most: int) -> int:
    """The largest token id that the model in this folder knows, `most` at the most, 1 at the least.

    `most`, too, without a folder, or where it has no `config.json` that says `vocab_size`.
    """
    try:
        config = json.loads((model / CONFIG_NAME).read_bytes()) if model else {}
        size = config.get("vocab_size") or config["text_config"]["vocab_size"]
        return max(1, min(most, int(size) - 1))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return most
