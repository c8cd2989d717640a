"""The garbage collector and what lives as long as the process."""

import gc


def freeze_heap() -> None:
    """Keep what is alive now out of every later collection. Call it once everything has started.

    With the libraries of an engine or a trainer that is hundreds of thousands of objects. Each full collection looks at
    all of them, for tenths of a second in which a service takes no token and fills no slot, and one rank holds up all.
    """
    gc.collect()
    gc.freeze()
