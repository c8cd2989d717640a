"""A contestant: one step of our trainer, from the encoded batch to the updated weights."""

import json
import sys
import tempfile
from pathlib import Path

from benchmarks.trainer_parts.protocol import Channel
from benchmarks.trainer_parts.workload import Workload, make_batch, run_settings


def main() -> None:
    """Steps for as long as they are asked for."""
    words = json.loads(sys.argv[1])
    work, model_dir = Workload(**words["work"]), Path(words["model_dir"])
    channel = Channel()
    import torch

    from protocol.batch import decode_batch, encode_batch
    from trainer.distributed import Ranks
    from trainer.engine import PolicyEngine, start_deepspeed
    from trainer.model import load_policy
    from trainer.update import Updater

    torch.set_num_threads(work.threads)
    with tempfile.TemporaryDirectory() as folder:
        settings = run_settings(work, model_dir, Path(folder), **words.get("sections", {}))
        device = start_deepspeed()
        ranks = Ranks(60.0)
        engine = PolicyEngine(settings, load_policy(settings, model_dir, device), ranks, device)
        engine.train(True)
        updater = Updater(settings, engine, None, ranks)
        step = 1
        data = encode_batch(make_batch(work, step))
        while channel.wait():
            report = updater.run(decode_batch(data), step, 0)
            channel.answer(report.metrics["actor/pg_loss"], report.metrics["actor/grad_norm"])
            step += 1
            data = encode_batch(make_batch(work, step))


if __name__ == "__main__":
    main()
