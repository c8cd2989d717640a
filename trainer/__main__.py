"""`python -m trainer RUN.toml --section.field=value …`: one rank, for `torchrun`, `deepspeed`, or alone."""

import sys
from pathlib import Path

from protocol.errors import AprilError
from protocol.settings import load_settings

USAGE = "usage: python -m trainer RUN.toml [--section.field=value ...]"


def main(words: list[str]) -> int:
    """Run the trainer; returns the exit code."""
    # The deepspeed launcher puts this word in front of a script's own.
    words = [w for w in words if not w.startswith(("--local_rank=", "--local-rank="))]
    if not words or words[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    try:
        settings = load_settings(Path(words[0]), words[1:])
        from trainer.threads import wait_passively

        wait_passively()
        from trainer.main import train
        from trainer.stopping import stop_no_more

        train(settings)
        stop_no_more()
    except AprilError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}; the run goes on from its last checkpoint when it is started again", file=sys.stderr)
        return 1
    leave_ranks()
    return 0


def leave_ranks() -> None:
    """Close what torch.distributed holds, so that the other ranks see an orderly end."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
