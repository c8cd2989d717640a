"""Entry of the trainer; runs on every rank."""

import logging
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from protocol.errors import SettingsError
from protocol.settings import RunSettings
from trainer.client import ServiceClient
from trainer.critic import Critic
from trainer.distributed import Ranks
from trainer.engine import PolicyEngine, start_deepspeed
from trainer.identity import has_critic
from trainer.loggers import set_up_messages
from trainer.loop import TrainingLoop
from trainer.model import load_policy
from trainer.objective import make_objective
from trainer.reference import make_reference
from trainer.sequence_parallel import check_sequence_parallel
from trainer.summary import TrainingSummary, summarise, write_summary
from trainer.update import Updater

LOG = logging.getLogger("april.trainer")
SUMMARY_NAME = "summary.json"


def train(settings: RunSettings) -> TrainingSummary:
    """Train the run to its end, or until SIGTERM; under a launcher this is one rank, else it is the only one.

    Writes the summary to `summary.json` in the trainer's folder. Raises errors of `protocol.errors`.
    """
    set_up_messages()
    if settings.model.path is None:
        raise SettingsError("the trainer needs a policy: set model.path to the folder of a Hugging Face model")
    check_sequence_parallel(settings)
    device = start_deepspeed()
    ranks = Ranks(settings.trainer.wait_timeout_s, settings.actor.ulysses_sequence_parallel_size)
    torch.manual_seed(settings.run.seed + ranks.rank)
    policy = load_policy(settings, settings.model.path, device, adapters=True, group=ranks.sequence)
    engine = PolicyEngine(settings, policy, ranks, device)
    engine.train(True)
    critic = Critic(settings, ranks, device) if has_critic(settings) else None
    needs_reference = make_objective(settings).needs_reference
    reference = make_reference(settings, engine, device, ranks.sequence) if needs_reference else None
    updater = Updater(settings, engine, reference, ranks, critic)
    with _stop_on_signals() as stop:
        client = ServiceClient(settings, stop) if ranks.is_main else None
        try:
            totals = TrainingLoop(settings, engine, updater, ranks, client, stop, critic).run()
        finally:
            if client is not None:
                client.close()
    summary = TrainingSummary(**ranks.share(summarise(totals).model_dump()))
    if ranks.is_main:
        write_summary(settings.trainer_dir / SUMMARY_NAME, summary)
    return summary


@contextmanager
def _stop_on_signals() -> Generator[threading.Event]:
    """An event that SIGTERM or a first Ctrl-C sets; a second one ends the process as usual."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    old = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def ask(number: int, _: Any) -> None:
        LOG.info("asked to stop: the step is finished and saved first")
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    for number in old:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
