"""Seeds of requests: no two samples are twins, and no segment repeats the randomness of the one before."""

import hashlib


def segment_seed(run_seed: int, sample_id: str, attempt: int) -> int:
    """A seed in [0, 2^63) for one attempt at one sample; the sample's id names its group and index."""
    digest = hashlib.blake2b(f"{run_seed}:{sample_id}:{attempt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
