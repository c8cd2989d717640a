"""Fixtures that tests of the trainer share; modules that need another service or other settings have their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from protocol.settings import RunSettings
from tests.trainer.factory import make_settings
from tests.trainer.fake_service import FakeService, serving
from tests.trainer.trainings import batch_of


@pytest.fixture
def service() -> Iterator[FakeService]:
    """A service that always has the next batch."""
    with serving(FakeService(batch_of)) as running:
        yield running


@pytest.fixture
def settings(tiny_model_dir: Path, tmp_path: Path, service: FakeService) -> RunSettings:
    """A run that trains with that service."""
    return make_settings(tiny_model_dir, tmp_path / "run", trainer={"service_url": service.url})


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small are faster on one thread, and the machine may be busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
