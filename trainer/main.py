"""Entry of the trainer; runs on every rank."""

import logging

import torch

from protocol.errors import SettingsError
from protocol.heap import freeze_heap
from protocol.settings import RunSettings, settings_without_effect
from protocol.tracing import check_tracing
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
from trainer.stopping import stop_requests
from trainer.summary import TrainingSummary, summarise, write_summary
from trainer.update import Updater

LOG = logging.getLogger("april.trainer")
SUMMARY_NAME = "summary.json"


def train(settings: RunSettings) -> TrainingSummary:
    """Train the run to its end, or until SIGTERM; under a launcher this is one rank, else it is the only one.

    Writes the summary to `summary.json` in the trainer's folder. Raises errors of `protocol.errors`.
    """
    set_up_messages(settings)
    if settings.model.path is None:
        raise SettingsError("the trainer needs a policy: set model.path to the folder of a Hugging Face model")
    check_sequence_parallel(settings)
    check_tracing(settings.tracing)
    device = start_deepspeed()
    ranks = Ranks(settings.trainer.wait_timeout_s, settings.actor.ulysses_sequence_parallel_size)
    for sentence in settings_without_effect(settings) if ranks.is_main else ():
        LOG.warning("%s", sentence)
    torch.manual_seed(settings.run.seed + ranks.rank)
    policy = load_policy(settings, settings.model.path, device, adapters=True, group=ranks.sequence)
    engine = PolicyEngine(settings, policy, ranks, device)
    engine.train(True)
    critic = Critic(settings, ranks, device) if has_critic(settings) else None
    needs_reference = make_objective(settings).needs_reference
    reference = make_reference(settings, engine, device, ranks.sequence) if needs_reference else None
    updater = Updater(settings, engine, reference, ranks, critic)
    freeze_heap()
    with stop_requests() as stop:
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
