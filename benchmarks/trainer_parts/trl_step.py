"""A contestant: one step of TRL's GRPOTrainer on the same tokens.

Everything but the generation is TRL's own: its data loader, its split into micro-batches, its forward and backward
passes, its loss, its optimizer step. Generation is replaced by handing over the batch's tokens, padded as TRL pads what
it has generated, with the same advantages. Old log-probs are left out, as TRL leaves them out when every batch is
used for one update.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset  # pyright: ignore[reportMissingTypeStubs]
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingTypeStubs]
from trl.trainer.utils import pad

from benchmarks.trainer_parts.protocol import Channel
from benchmarks.trainer_parts.workload import LEARNING_RATE, Workload, make_batch
from deploy.demo.byte_model import end_of_sequence_id, make_tokenizer
from protocol.batch import Batch

NUM_STEPS = 10_000  # more than are ever asked for


class TokensInsteadOfGeneration(GRPOTrainer):  # pyright: ignore[reportUntypedBaseClass]
    """TRL's trainer, fed with the workload's batches."""

    work: Workload
    next_step = 1
    total_loss = 0.0

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        batch = make_batch(self.work, self.next_step)
        self.next_step += 1
        return generated(batch, end_of_sequence_id(make_tokenizer()))

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        loss = super()._compute_loss(model, inputs)
        self.total_loss += float(loss.detach())
        return loss

    def take_loss(self) -> float:
        """Of the step that has ended; its metrics are dropped, since nobody reads them."""
        loss, self.total_loss = self.total_loss, 0.0
        self._metrics["train"].clear()
        return loss


class TurnTaking(TrainerCallback):
    """Each optimizer step waits until it is asked for."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.trainer: TokensInsteadOfGeneration | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait; without another step to make, end."""
        if not self._channel.wait():
            sys.exit(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Tell what the step took."""
        trainer = self.trainer
        assert trainer is not None, "it is set before training starts"
        self._channel.answer(trainer.take_loss(), float("nan"))


def generated(batch: Batch, pad_token_id: int) -> dict[str, torch.Tensor]:
    """What TRL's generation returns: prompts padded on the left, completions on the right, to the longest of all."""
    tokens = torch.from_numpy(batch.tokens.astype(np.int64))
    prompts: list[torch.Tensor] = []
    completions: list[torch.Tensor] = []
    for start, end, prompt in zip(
        batch.sample_offsets[:-1], batch.sample_offsets[1:], batch.prompt_lengths, strict=True
    ):
        prompts.append(tokens[start : start + prompt])
        completions.append(tokens[start + prompt : end])
    sides = {"prompt": (prompts, "left"), "completion": (completions, "right")}
    output: dict[str, torch.Tensor] = {}
    for name, (rows, side) in sides.items():
        output[f"{name}_ids"] = pad(rows, padding_value=pad_token_id, padding_side=side)
        output[f"{name}_mask"] = pad([torch.ones_like(r) for r in rows], padding_value=0, padding_side=side)
    output["advantages"] = advantages(batch)
    output["num_items_in_batch"] = output["completion_mask"].sum()
    return output


def advantages(batch: Batch) -> torch.Tensor:
    """Rewards normalised within the group, [S]."""
    rewards = torch.from_numpy(batch.rewards.astype(np.float64))
    groups = torch.from_numpy(batch.group_index.astype(np.int64))
    output = torch.empty_like(rewards)
    for group in groups.unique():
        mine = groups == group
        output[mine] = (rewards[mine] - rewards[mine].mean()) / (rewards[mine].std() + 1e-6)
    return output.float()


def configuration(work: Workload, folder: str) -> GRPOConfig:
    """GRPO with TRL's defaults, but float32, no gradient checkpointing and no reports, as on our side."""
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=work.samples_at_once,
        gradient_accumulation_steps=work.num_samples // work.samples_at_once,
        num_generations=work.n,
        max_completion_length=work.max_response,
        max_steps=NUM_STEPS,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        temperature=1.0,
        beta=0.0,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def main() -> None:
    """Steps for as long as they are asked for."""
    words = json.loads(sys.argv[1])
    work, model_dir = Workload(**words["work"]), Path(words["model_dir"])
    channel = Channel()
    torch.set_num_threads(work.threads)
    turns = TurnTaking(channel)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TokensInsteadOfGeneration(
            model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=configuration(work, folder),
            train_dataset=Dataset.from_dict({"prompt": ["?"] * work.num_samples}),
            processing_class=make_tokenizer(),
            callbacks=[turns],
        )
        trainer.work = work
        turns.trainer = trainer
        trainer.train()


if __name__ == "__main__":
    main()
