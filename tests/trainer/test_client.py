"""What the client does with each answer."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ConflictError, DataError, FencedError, SettingsError, UnauthorizedError, UnavailableError
from tests.trainer.factory import make_batch, make_settings
from tests.trainer.fake_service import FakeService, serving
from trainer.client import ServiceClient, Stopped
from trainer.fetch import BatchFetcher
from trainer.loop import planned_steps

ClientOf = Callable[..., ServiceClient]


@pytest.fixture
def service() -> Iterator[FakeService]:
    with serving(FakeService(lambda step, version: make_batch(step=step), token="secret")) as running:
        yield running


@pytest.fixture
def client_of() -> Iterator[Callable[..., ServiceClient]]:
    """Makes clients, and closes them."""
    clients: list[ServiceClient] = []

    def make(url: str, **trainer: Any) -> ServiceClient:
        values = {"service_url": url, "token": "secret"} | trainer
        clients.append(ServiceClient(make_settings(Path("model"), Path("run"), trainer=values), threading.Event()))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def test_token_epoch_and_checksum(service: FakeService, client_of: ClientOf) -> None:
    client = client_of(service.url)
    assert client.open_session(0).trainer_epoch == 1
    assert client.lease_batch(1) == client.lease_batch(1)
    assert service.leases == [(1, 1), (1, 1)]
    with pytest.raises(UnauthorizedError, match="token"):
        client_of(service.url, token="wrong").open_session(0)


def test_refusals_have_their_class(service: FakeService, client_of: ClientOf) -> None:
    old = client_of(service.url)
    old.open_session(3)
    with pytest.raises(ConflictError, match="below the last ack 3") as below:
        client_of(service.url).open_session(1)
    assert not isinstance(below.value, FencedError)
    client_of(service.url).open_session(3)
    for call in (lambda: old.acknowledge(4), lambda: old.lease_batch(4), lambda: old.report_trained(4)):
        with pytest.raises(FencedError, match=r"superseded by 2; this trainer was superseded and stops"):
            call()
    assert service.durable_step == 3


def test_gives_up_on_a_service_that_never_answers(client_of: ClientOf) -> None:
    client = client_of("http://127.0.0.1:9", wait_timeout_s=0.3)
    with pytest.raises(UnavailableError, match=r"http://127\.0\.0\.1:9 gave no answer .* trainer\.service_url"):
        client.open_session(0)


def test_a_restart_of_the_service_is_waited_for(service: FakeService, client_of: ClientOf) -> None:
    with serving(FakeService(service.make_batch)) as gone:
        url = gone.url
    moved = client_of(url)
    moved.epoch = 1
    back = FakeService(service.make_batch, trainer_epoch=1)
    results: list[int] = []
    waiting = threading.Thread(target=lambda: results.append(moved.acknowledge(2).durable_step))
    waiting.start()
    with serving(back, int(url.rsplit(":", 1)[1])):
        waiting.join(60)
    assert results == [2]


def as_it_is(_: int, data: bytes) -> bytes:
    return data


def test_a_stop_ends_the_wait_for_a_batch(service: FakeService, client_of: ClientOf) -> None:
    client = client_of(service.url)
    client.open_session(0)
    service.not_ready = 10**6
    fetcher = BatchFetcher(client, as_it_is)
    fetcher.request(1)
    assert fetcher.poll(0.05) is None
    client.stop.set()
    with pytest.raises(Stopped):
        fetcher.poll(60)


def test_fetching_a_step_twice_is_one_lease(service: FakeService, client_of: ClientOf) -> None:
    client = client_of(service.url)
    client.open_session(0)
    fetcher = BatchFetcher(client, as_it_is)
    fetcher.request(1)
    fetcher.request(1)
    assert fetcher.poll(30) == client.lease_batch(1)
    assert service.leases == [(1, 1), (1, 1)], "one by the fetcher, one here"


def test_a_batch_is_prepared_where_it_is_fetched_and_what_fails_there_is_raised_here(
    service: FakeService, client_of: ClientOf
) -> None:
    client = client_of(service.url)
    client.open_session(0)
    threads: list[str] = []

    def prepare(step: int, data: bytes) -> int:
        threads.append(threading.current_thread().name)
        if step == 2:
            raise DataError("broken")
        return len(data)

    fetcher = BatchFetcher(client, prepare)
    fetcher.request(1)
    assert fetcher.poll(30) == len(client.lease_batch(1))
    fetcher.request(2)
    with pytest.raises(DataError, match="broken"):
        fetcher.poll(30)
    assert threads == ["lease-step-1", "lease-step-2"]


def test_planned_steps() -> None:
    epochs = make_settings(Path("m"), Path("r"), trainer={"total_training_steps": None, "total_epochs": 3})
    assert planned_steps(epochs, 10) == 7
    with pytest.raises(SettingsError, match="make no batch"):
        planned_steps(epochs, 1)
    assert planned_steps(make_settings(Path("m"), Path("r")), 0) == 3
