"""Tokenizers of one token a byte, with and without a chat template, and files to load."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protocol.settings import RunSettings

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m['role']) }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}|{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)


def _save_tokenizer(folder: Path, chat_template: str | None) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "<s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    # It puts <s> in front when asked for special tokens, which prompts must not get a second time.
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tokenizer with a chat template."""
    return _save_tokenizer(tmp_path_factory.mktemp("chat"), CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def plain_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tokenizer without a chat template."""
    return _save_tokenizer(tmp_path_factory.mktemp("plain"), None)


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[..., Path]:
    """Write records as a JSONL file."""

    def write(*records: Any, name: str = "train.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return write


@pytest.fixture
def make_settings(chat_tokenizer: Path) -> Callable[..., RunSettings]:
    """Settings of a run with the chat tokenizer, from fields of `data` and whole sections."""

    def make(tokenizer: Path | None = chat_tokenizer, seed: int = 0, reward: str = "auto", **data: Any) -> RunSettings:
        return RunSettings.model_validate(
            {
                "run": {"seed": seed},
                "model": {"tokenizer_path": tokenizer},
                "data": data,
                "reward": {"name": reward},
            }
        )

    return make
