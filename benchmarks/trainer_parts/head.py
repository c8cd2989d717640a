"""A contestant: log-probs and entropy of many tokens over a large vocabulary, forward and backward.

`chunked` is the trainer's head; `full` is the plain way: all logits, their log-softmax, its exponential.
"""

import json
import sys

import torch
from torch import Tensor, nn

from benchmarks.trainer_parts.protocol import Channel
from trainer.logprobs import LogprobHead, TokenLogprobs

DEFAULT_CHUNK = 512  # of actor.logits_chunk_tokens


def full_logprobs(layer: nn.Linear, hidden: Tensor, targets: Tensor) -> TokenLogprobs:
    """The same numbers from the full logits."""
    log_p = torch.log_softmax(layer(hidden), -1)
    with torch.no_grad():
        entropy = -(log_p.exp() * log_p).sum(-1)
    return TokenLogprobs(log_p.gather(1, targets[:, None])[:, 0], entropy)


def main() -> None:
    """One forward and backward pass a step."""
    words = json.loads(sys.argv[1])
    channel = Channel()
    torch.set_num_threads(words["work"]["threads"])
    torch.manual_seed(0)
    layer = nn.Linear(words["hidden"], words["vocabulary"], bias=False)
    hidden = torch.randn(words["tokens"], words["hidden"], requires_grad=True)
    targets = torch.randint(0, words["vocabulary"], (words["tokens"],))
    head = LogprobHead(layer, 1.0, DEFAULT_CHUNK)
    while channel.wait():
        out = head(hidden, targets) if words["form"] == "chunked" else full_logprobs(layer, hidden, targets)
        loss = -out.logprobs.mean()
        loss.backward()
        assert hidden.grad is not None, "it takes part in the loss"
        channel.answer(float(loss.detach()), float(hidden.grad.norm()))
        hidden.grad = layer.weight.grad = None


if __name__ == "__main__":
    main()
