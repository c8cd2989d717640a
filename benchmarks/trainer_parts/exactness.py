"""The same loss and gradient for any split into micro-batches and over ranks.

Run under torchrun it is one rank: the trainer's own `Updater` on a batch whose samples were written by two versions,
with an engine that keeps the gradient instead of taking a step.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.trainer_parts.workload import Workload, make_batch, run_settings
from trainer.distributed import Ranks, prepare_environment
from trainer.logprobs import TokenLogprobs
from trainer.model import PolicyModel, load_policy
from trainer.packing import MicroBatch
from trainer.update import Updater

LOSS = "loss"
Gradients = dict[tuple[str, str], dict[str, Tensor]]  # by dtype and split
SMALL = Workload(num_prompts=3, n=4, median_response=24, max_response=128, vocabulary=512, hidden_size=64, num_layers=2)
SPLITS: dict[str, dict[str, Any]] = {
    "one micro-batch": {"actor": {"ppo_max_token_len_per_gpu": 1 << 20}},
    "200 tokens each": {"actor": {"ppo_max_token_len_per_gpu": 200}},
    "one sample each": {"actor": {"ppo_max_token_len_per_gpu": 1}},
    "5 samples each": {"actor": {"use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": 5}},
    "padded": {"model": {"use_remove_padding": False}, "actor": {"ppo_max_token_len_per_gpu": 200}},
}


class GradientEngine:
    """What `Updater` needs of an engine; `update` sums the gradient over ranks and keeps it."""

    def __init__(self, policy: PolicyModel) -> None:
        self.policy = policy
        self.device = torch.device("cpu")
        self.gradient: dict[str, Tensor] = {}

    def train(self, mode: bool) -> None:
        """Nothing depends on it."""

    def learning_rate(self, step: int) -> float:
        """It is not used."""
        return 0.0

    def forward(self, micro: MicroBatch) -> TokenLogprobs:
        """With gradient."""
        return self.policy(micro)

    @torch.no_grad()
    def logprobs(self, micro: MicroBatch) -> Tensor:
        """Without."""
        return self.policy(micro).logprobs

    def backward(self, loss: Tensor) -> bool:
        """Add the gradient of a share of the loss."""
        loss.backward()
        return True

    def update(self, lr: float, skip: bool) -> float:
        """Keep the sum over ranks."""
        for name, parameter in self.policy.named_parameters():
            assert parameter.grad is not None, "every parameter takes part on every rank"
            dist.all_reduce(parameter.grad)
            self.gradient[name] = parameter.grad
        return float(torch.stack([g.norm() for g in self.gradient.values()]).norm())


def gradients(model_dir: Path, num_ranks: int, dtypes: Sequence[str]) -> Gradients:
    """Loss and gradient by dtype and split, on `num_ranks` ranks with a process each."""
    with tempfile.TemporaryDirectory() as folder:
        words = json.dumps({"model_dir": str(model_dir), "folder": folder, "dtypes": list(dtypes)})
        launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
        command = [*launcher, f"--nproc_per_node={num_ranks}", "-m", "benchmarks.trainer_parts.exactness", words]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        return {(dtype, split): load_file(_path(folder, dtype, split)) for dtype in dtypes for split in SPLITS}


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> tuple[float, float]:
    """Relative, of the loss and of the whole gradient."""
    loss = float((one[LOSS] - other[LOSS]).abs() / other[LOSS].abs())
    names = [name for name in other if name != LOSS]
    apart = torch.stack([(one[n] - other[n]).double().norm() for n in names]).norm()
    return loss, float(apart / torch.stack([other[n].double().norm() for n in names]).norm())


def main() -> None:
    """One rank: every split in every dtype."""
    words = json.loads(sys.argv[1])
    prepare_environment()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    ranks = Ranks(60.0)
    for dtype in words["dtypes"]:
        for split in SPLITS:
            found = _gradient(split, getattr(torch, dtype), Path(words["model_dir"]), ranks)
            if ranks.is_main:
                save_file(found, _path(words["folder"], dtype, split))
    dist.destroy_process_group()


def _gradient(split: str, dtype: torch.dtype, model_dir: Path, ranks: Ranks) -> dict[str, Tensor]:
    sections = dict(SPLITS[split])
    # The default correction and an entropy bonus: every term that the split could change.
    sections["actor"] = sections["actor"] | {"entropy_coeff": 0.01}
    sections["algorithm"] = {"correction": "decoupled"}
    settings = run_settings(SMALL, model_dir, model_dir, **sections)
    engine = GradientEngine(load_policy(settings, model_dir, torch.device("cpu")).to(dtype))
    report = Updater(settings, engine, None, ranks).run(make_batch(SMALL, 1), 1, 0)  # pyright: ignore[reportArgumentType]  it has what an update calls
    return engine.gradient | {LOSS: torch.tensor(report.metrics["actor/pg_loss"], dtype=torch.float64)}


def _path(folder: str, dtype: str, split: str) -> Path:
    return Path(folder) / f"{dtype}-{split.replace(' ', '-')}.safetensors"


if __name__ == "__main__":
    main()
