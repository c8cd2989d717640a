"""Settings of prompts and rewards."""

from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from protocol.settings.base import Section


class Truncation(StrEnum):
    """What to do with a prompt longer than `max_prompt_length`."""

    ERROR = "error"
    LEFT = "left"
    RIGHT = "right"
    MIDDLE = "middle"


class ReasoningGymTask(Section):
    """One reasoning-gym generator in the mixture."""

    name: str
    """Name of the generator, such as `chain_sum`."""
    weight: float = Field(default=1.0, gt=0)
    """Relative share of this generator's questions among the prompts."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the generator, passed to reasoning-gym as they are."""


class DataSettings(Section):
    """Where prompts come from: `train_files` (Parquet or JSONL), or `reasoning_gym`, or a `source` of your own."""

    train_files: list[Path] = Field(default_factory=list)
    """Parquet or JSONL files of prompts, read in order. GSM8K's format (question, answer) is recognised."""
    val_files: list[Path] = Field(default_factory=list)
    """Held-out prompts, for evaluations."""
    reasoning_gym: list[ReasoningGymTask] = Field(default_factory=list)
    """A mixture of reasoning-gym generators instead of files."""
    source: str | None = None
    """`module:function` that is called with the run's settings and returns (training rows, held-out rows), instead of
    files; see docs/data.md."""
    num_train_prompts: int = Field(default=10_000, ge=1)
    """Generated prompts an epoch (generators and `source` only)."""
    num_val_prompts: int = Field(default=256, ge=1)
    """Held-out prompts (generators), and the most that one evaluation uses."""
    train_batch_size: int = Field(default=32, ge=1)
    """N: prompts (groups) that one trainer step consumes."""
    max_prompt_length: int = Field(default=512, ge=1)
    """Tokens of a prompt, after the chat template."""
    max_response_length: int = Field(default=1024, ge=1)
    """Tokens of a response, over all its segments."""
    filter_overlong_prompts: bool = False
    """Leave out prompts longer than `max_prompt_length` (their number is logged)."""
    truncation: Truncation = Truncation.ERROR
    """What to do with an overlong prompt that was not filtered."""
    apply_chat_template: bool = True
    """Wrap prompts in the tokenizer's chat template. Off: the text is sent as it is."""
    system_prompt: str | None = None
    """System message in front of every prompt (with a chat template)."""
    instruction: str | None = None
    """Text appended to every question, such as how to mark the final answer."""
    shuffle: bool = True
    """Shuffle each epoch with `run.seed`."""
    prompt_key: str = "prompt"
    """Column of the prompt: a string, or a list of chat messages."""

    @model_validator(mode="after")
    def _one_source(self) -> "DataSettings":
        sources = [bool(self.train_files), bool(self.reasoning_gym), self.source is not None]
        if sum(sources) > 1:
            raise ValueError("name only one of data.train_files, data.reasoning_gym and data.source")
        return self


class RewardSettings(Section):
    """How a finished sample is scored."""

    name: str = "auto"
    """`auto` (by the data source), `reasoning_gym`, `math_verify`, `exact_match`, `gsm8k`, or `module:function`."""
    timeout_s: float = Field(default=30.0, gt=0)
    """A scorer that takes longer is killed, and the sample FAILS with the reason `reward_timeout`."""
    num_workers: int = Field(default=1, ge=1)
    """Scorer processes."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Passed to the scorer as keyword arguments."""
