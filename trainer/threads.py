"""How this process's OpenMP threads wait; imports nothing, since it must run before torch is loaded."""

import os


def wait_passively() -> None:
    """Let threads sleep at a barrier, unless the user has said otherwise.

    Threads that spin there while the engine has their core make a step several times slower; the OpenMP runtime reads
    the variable once, when torch is loaded.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
