"""A small Qwen3-shaped model with a byte-level tokenizer, made without a network.

Used by the demo, which trains it, and by tests, which take it with random weights.
"""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

END_OF_SEQUENCE = "<|end|>"
VOCABULARY_SIZE = 512  # 256 bytes and specials, rounded up to what matrix kernels like


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, plus an end of sequence; no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_SEQUENCE, pad_token=END_OF_SEQUENCE)


def end_of_sequence_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """Id of the token that ends a response; it pads, too."""
    token_id = tokenizer.convert_tokens_to_ids(END_OF_SEQUENCE)
    assert isinstance(token_id, int), "one token in, one id out"
    return token_id


def make_model(
    seed: int, hidden_size: int = 128, intermediate_size: int = 256, num_layers: int = 3, max_length: int = 512
) -> Qwen3ForCausalLM:
    """Random weights in float32: 0.5 M parameters with the defaults, tied embeddings."""
    torch.manual_seed(seed)
    eos = end_of_sequence_id(make_tokenizer())
    config = Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=max(1, hidden_size // 64),
        head_dim=32,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=eos,
        dtype=torch.float32,
    )
    return Qwen3ForCausalLM(config)


def save_policy(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write model and tokenizer as a Hugging Face folder that vLLM and the trainer load."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


@contextmanager
def one_thread() -> Generator[None]:
    """Compute with one thread, as is best for a model this small.

    A second thread saves a quarter of the time on idle cores and makes busy ones many times slower, because the
    threads wait for each other actively; and one thread gives the same numbers however many cores there are.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
