"""A task that any model can do by chance, for whole-process tests."""

import hashlib


def rows(settings):
    """Short prompts; the label is a number."""
    prompts = [{"prompt": f"{i}+{i + 1}=", "ground_truth": str(2 * i + 1), "data_source": "sums"} for i in range(200)]
    return prompts[:180], prompts[180:]


def few_rows(settings):
    """Prompts that come up again every two or three rounds."""
    train, held_out = rows(settings)
    return train[:12], held_out


def score(data_source, solution_str, ground_truth, extra_info=None):
    """A coin that the response decides: half of all responses are right."""
    return float(hashlib.blake2b((solution_str + ground_truth).encode(), digest_size=1).digest()[0] % 2)
