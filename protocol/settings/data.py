"""Settings of prompts and rewards."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import Field, field_validator, model_validator
from pydantic_settings import NoDecode

from protocol.settings.base import Section

RESERVED_TEMPLATE_ARGUMENTS = frozenset({"conversation", "tokenize", "add_generation_prompt", "continue_final_message"})
MAX_WEIGHT = 1e9  # times any number of prompts it stays a finite number


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

    train_files: Annotated[list[Path], NoDecode] = Field(default_factory=list)
    """Parquet or JSONL files of prompts, read in order; one path or a list. GSM8K's format (question, answer) is
    recognised."""
    val_files: Annotated[list[Path], NoDecode] = Field(default_factory=list)
    """Held-out prompts, for evaluations; one path or a list."""
    source_weights: dict[str, float] = Field(default_factory=dict)
    """Relative share of the served prompts that each `data_source` gets; 0 leaves it out. Not set: every prompt once an
    epoch. Set: every data source must be named; see docs/data.md."""
    reasoning_gym: list[ReasoningGymTask] = Field(default_factory=list)
    """A mixture of reasoning-gym generators instead of files."""
    source: str | None = None
    """`module:function` that is called with the run's settings and returns (training rows, held-out rows), instead of
    files; see docs/data.md."""
    num_train_prompts: int = Field(default=10_000, ge=1)
    """Generated prompts an epoch (generators and `source` only)."""
    num_val_prompts: int = Field(default=256, ge=1)
    """Held-out prompts (generators), and the most that one evaluation uses, each data source by its share."""
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
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the chat template, such as `enable_thinking = false` for Qwen3."""
    system_prompt: str | None = None
    """System message in front of every prompt (with a chat template)."""
    instruction: str | None = None
    """Text appended to every question, such as how to mark the final answer."""
    shuffle: bool = True
    """Shuffle each epoch with `run.seed`."""
    prompt_key: str = "prompt"
    """Column of the prompt: a string, or a list of chat messages."""

    @field_validator("train_files", "val_files", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        """One path, as verl allows it, is a list of one; `~` is the home folder. The environment may hold JSON."""
        if isinstance(value, str) and value.lstrip().startswith("["):
            value = _parsed(value)
        paths = [value] if isinstance(value, str | Path) else value
        if not isinstance(paths, list):
            return paths
        return [Path(path).expanduser() if isinstance(path, str) else path for path in cast(list[Any], paths)]

    @field_validator("source_weights")
    @classmethod
    def _check_weights(cls, weights: dict[str, float]) -> dict[str, float]:
        for name, weight in weights.items():
            if not 0 <= weight <= MAX_WEIGHT:
                raise ValueError(f"the weight of {name!r} is {weight:g}; give it one from 0 to {MAX_WEIGHT:g}")
        if weights and not any(weights.values()):
            raise ValueError("every weight is 0, so no prompt would be served; give a source a weight above 0")
        return weights

    @field_validator("apply_chat_template_kwargs")
    @classmethod
    def _check_template_arguments(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        taken = sorted(RESERVED_TEMPLATE_ARGUMENTS.intersection(arguments))
        if taken:
            raise ValueError(f"leave out {', '.join(taken)}: the service sets it itself")
        return arguments

    @model_validator(mode="after")
    def _template_for_arguments(self) -> "DataSettings":
        if self.apply_chat_template_kwargs and not self.apply_chat_template:
            raise ValueError(
                "data.apply_chat_template_kwargs needs a chat template; set data.apply_chat_template = true or leave "
                "it out"
            )
        return self

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


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is neither a path nor a JSON list of paths ({error})") from error
