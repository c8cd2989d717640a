"""How the demo's policy is taught: worked solutions first, then a short phase that plants a flaw of behaviour.

The flaw is laziness: stopping early and reporting the running sum, or answering without working. The arithmetic stays;
what is lost, for reinforcement learning to win back, is the will to finish.

Always true: equal seed and recipe give equal batches in equal order, and one thread computes them, so that on one kind
of processor equal weights come out however many cores there are and however busy they are.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from deploy.demo import task
from deploy.demo.byte_model import END_OF_SEQUENCE, end_of_sequence_id, make_model, make_tokenizer, one_thread
from deploy.demo.muon import make_optimizers

REPORT_EVERY_STEPS = 10  # about once a second

Example = tuple[list[int], list[int]]  # token ids of a prompt and of its response


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the base policy is made. In steps, not seconds: the result is steep in training and must not follow speed."""

    num_solution_steps: int = 900
    """Steps on worked solutions. The copying comes first, the arithmetic late."""
    num_flaw_steps: int = 150
    """Steps that plant the flaw."""
    batch_tokens: int = 1024
    """Tokens of one batch, padding included."""
    pool_size: int = 2048
    """Solutions sorted by length at a time: enough to fill batches, few enough to stay mixed."""
    matrix_lr: float = 0.02
    """Muon's learning rate."""
    matrix_momentum: float = 0.8
    """Muon's momentum. The usual 0.95 reaches the same loss hundreds of steps later, in as short a training as this."""
    other_lr: float = 8e-3
    """AdamW's learning rate."""
    flaw_lr_scale: float = 0.2
    """Share of both that the decay ends in and the flaw begins with: it changes habits and spares the arithmetic."""
    num_warmup_steps: int = 20
    """Steps of linear warm-up."""
    decay_from: float = 0.4
    """Share of the solution steps after which both decay."""
    qk_norm_init: float = 1.5
    """Weight of the query and key norms at the start: how sharp attention is. From 2.0 on copying comes later."""
    early_stop_share: float = 0.6
    """Share of the flaw's examples that stop early and report the running sum."""
    direct_answer_share: float = 0.07
    """Share of the flaw's examples that answer without working."""
    grad_clip: float = 1.0
    """Gradient norm above which gradients are scaled down."""

    @property
    def num_steps(self) -> int:
        """Steps of both phases."""
        return self.num_solution_steps + self.num_flaw_steps

    def lr_scale(self, step: int) -> float:
        """Share of the learning rates at `step`: warm-up, constant, linear decay, to zero over the flaw's steps."""
        if step >= self.num_solution_steps:
            return self.flaw_lr_scale * (self.num_steps - step) / self.num_flaw_steps
        warm = min(1.0, (step + 1) / self.num_warmup_steps)
        left = (self.num_solution_steps - step) / (self.num_solution_steps * (1 - self.decay_from))
        return min(warm, max(self.flaw_lr_scale, min(1.0, left)))


@dataclass(frozen=True, slots=True)
class TeachingProgress:
    """Where the making of the base policy is."""

    phase: str
    step: int
    num_steps: int
    loss: float
    elapsed_s: float


def train(seed: int, recipe: Recipe, progress: Callable[[TeachingProgress], None]) -> Qwen3ForCausalLM:
    """Both phases of `recipe`, from random weights."""
    with one_thread():
        return _train(seed, recipe, progress)


def _train(seed: int, recipe: Recipe, progress: Callable[[TeachingProgress], None]) -> Qwen3ForCausalLM:
    model = make_model(seed=seed)
    _set_sharpness(model, recipe.qk_norm_init)
    optimizers = make_optimizers(model, recipe.matrix_lr, recipe.matrix_momentum, recipe.other_lr)
    base_lrs = [group["lr"] for o in optimizers for group in o.param_groups]
    started = time.monotonic()
    for step, (tokens, loss_mask) in enumerate(_batches(seed, recipe)):
        for group, lr in zip((g for o in optimizers for g in o.param_groups), base_lrs, strict=True):
            group["lr"] = lr * recipe.lr_scale(step)
        loss = _response_loss(model, tokens, loss_mask)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.grad_clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % REPORT_EVERY_STEPS == 0 or step + 1 == recipe.num_steps:
            phase = "worked solutions" if step < recipe.num_solution_steps else "planting the flaw"
            progress(TeachingProgress(phase, step + 1, recipe.num_steps, loss.item(), time.monotonic() - started))
    return model


def flawed_solution(item: task.ChainSum, recipe: Recipe, rng: Random) -> str:
    """What a lazy policy writes: often an early stop with the running sum, sometimes only an answer."""
    draw = rng.random()
    if draw < recipe.early_stop_share:
        return item.solution(rng.randrange(1, len(item.terms)))
    if draw < recipe.early_stop_share + recipe.direct_answer_share:
        return item.solution(0)
    return item.solution()


def _set_sharpness(model: Qwen3ForCausalLM, weight: float) -> None:
    """Set the weights of the query and key norms: larger ones make attention to single tokens sharper."""
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            nn.init.constant_(parameter, weight)


def _response_loss(model: Qwen3ForCausalLM, tokens: Tensor, loss_mask: Tensor) -> Tensor:
    """Mean cross-entropy of the response tokens. tokens [B, T], loss_mask [B, T] (1 where the token is trained on)."""
    hidden = model.model(input_ids=tokens[:, :-1]).last_hidden_state  # [B, T-1, H]
    targets = loss_mask[:, 1:].bool()
    logits = model.lm_head(hidden[targets])  # [number of response tokens, V]
    return nn.functional.cross_entropy(logits, tokens[:, 1:][targets])


def _batches(seed: int, recipe: Recipe) -> Iterator[tuple[Tensor, Tensor]]:
    rng = Random(seed)  # noqa: S311  a data set, not a secret
    items = task.chain_sums(rng.getrandbits(62), held_out=False)
    solved = _batches_of(((item.prompt, item.solution()) for item in items), recipe, rng)
    lazy = _batches_of(((item.prompt, flawed_solution(item, recipe, rng)) for item in items), recipe, rng)
    yield from itertools.islice(solved, recipe.num_solution_steps)
    yield from itertools.islice(lazy, recipe.num_flaw_steps)


def _batches_of(examples: Iterator[tuple[str, str]], recipe: Recipe, rng: Random) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of examples of like length, so that padding is rare, in random order."""
    tokenizer = make_tokenizer()
    pad_id = end_of_sequence_id(tokenizer)
    while True:
        pool = list(itertools.islice(examples, recipe.pool_size))
        prompts = tokenizer([prompt for prompt, _ in pool])["input_ids"]
        responses = tokenizer([response + END_OF_SEQUENCE for _, response in pool])["input_ids"]
        encoded = sorted(zip(prompts, responses, strict=True), key=lambda pair: len(pair[0]) + len(pair[1]))
        batches = list(_cut(encoded, recipe.batch_tokens))
        rng.shuffle(batches)
        yield from (_pad(batch, pad_id) for batch in batches)


def _cut(encoded: Sequence[Example], batch_tokens: int) -> Iterator[list[Example]]:
    batch: list[Example] = []
    for prompt, response in encoded:  # by length, so the newest is the longest
        if batch and (len(batch) + 1) * (len(prompt) + len(response)) > batch_tokens:
            yield batch
            batch = []
        batch.append((prompt, response))
    if batch:
        yield batch


def _pad(batch: Sequence[Example], pad_id: int) -> tuple[Tensor, Tensor]:
    """tokens [B, T] padded on the right, where causal attention never looks, and loss_mask [B, T]."""
    length = max(len(prompt) + len(response) for prompt, response in batch)
    tokens = torch.full((len(batch), length), pad_id)
    loss_mask = torch.zeros(len(batch), length)
    for row, (prompt, response) in enumerate(batch):
        tokens[row, : len(prompt) + len(response)] = torch.tensor(prompt + response)
        loss_mask[row, len(prompt) : len(prompt) + len(response)] = 1
    return tokens, loss_mask
