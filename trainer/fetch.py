"""The next batch is fetched, and prepared as far as one rank can, while this one trains.

Always true: one lease is asked for at a time, in the order of the steps, and asking early does not reorder anything:
the service decides when a batch is ready, and publishing after a step never waits for the fetch of the next; what goes
wrong with a batch is raised where it is asked for.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from typing import Generic, TypeVar

from trainer.client import ServiceClient

Prepared = TypeVar("Prepared")


class BatchFetcher(Generic[Prepared]):
    """Fetches in a daemon thread, so that a long poll never holds up the end of the process.

    `prepare` is called in that thread with the step and the bytes of its batch.
    """

    def __init__(self, client: ServiceClient, prepare: Callable[[int, bytes], Prepared]) -> None:
        self._client = client
        self._prepare = prepare
        self._step: int | None = None
        self._future: Future[Prepared] = Future()

    def request(self, step: int) -> None:
        """Begin to fetch the batch of `step`; a no-op if it is being fetched."""
        if self._step == step:
            return
        self._step, self._future = step, Future()
        threading.Thread(target=self._fetch, args=(step, self._future), name=f"lease-step-{step}", daemon=True).start()

    def poll(self, timeout_s: float) -> Prepared | None:
        """The batch asked for, or None if it is not there within `timeout_s`; raises what fetching it raised."""
        try:
            return self._future.result(timeout_s)
        except TimeoutError:
            if self._future.done():
                raise
            return None

    def _fetch(self, step: int, future: "Future[Prepared]") -> None:
        try:
            future.set_result(self._prepare(step, self._client.lease_batch(step)))
        except BaseException as error:
            future.set_exception(error)
