"""A process that does one job of `forecast_job`: JSON on standard input, JSON on standard output."""

import json
import os
import sys

from protocol.errors import AprilError
from rollout_service.watch.forecast_job import do_job

NICE = 19  # whatever else there is to do comes first


def main() -> None:
    """Do the job, or answer with the sentence that says why not."""
    os.nice(NICE)
    try:
        answer = do_job(json.load(sys.stdin))
    except AprilError as error:
        answer = {"error": str(error)}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
