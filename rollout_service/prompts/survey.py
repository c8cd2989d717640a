"""What was read and what becomes of it, in numbers, for people who look before they train."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from protocol.samples import Json
from protocol.settings import RunSettings
from rollout_service.prompts.encode import EncodedRow, Fit
from rollout_service.prompts.interface import PromptSet
from rollout_service.prompts.load import ReadData
from rollout_service.prompts.order import source_quotas
from rollout_service.prompts.repeats import Repeats, count_repeats


@dataclass(frozen=True, slots=True)
class SourceSurvey:
    """One data source. Lengths are of all its prompts in tokens, before filtering and truncation.

    `num_used`: training prompts that are served, or held-out prompts that an evaluation takes. `share`: of the served
    prompts; `times_served`: how often each of them comes in an epoch.
    """

    data_source: str
    num_rows: int
    num_used: int
    num_filtered: int
    num_truncated: int
    num_refused: int
    p50_tokens: int
    p90_tokens: int
    p99_tokens: int
    max_tokens: int
    share: float | None = None
    times_served: float | None = None


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt as the engine gets it."""

    prompt_id: str
    text: str
    num_tokens: int
    ground_truth: Json


@dataclass(frozen=True, slots=True)
class DataSurvey:
    """All data sources; what needs prompts that can be served is None if they can't be."""

    train: list[SourceSurvey]
    validation: list[SourceSurvey]
    weights: dict[str, float]
    repeats: Repeats | None
    example: Example | None


def survey_data(read: ReadData, prompts: PromptSet | None, settings: RunSettings) -> DataSurvey:
    """The survey of what was read; `prompts` is None if `make_prompts` refused it."""
    weights = settings.data.source_weights
    served = Counter(prompt.data_source for prompt in prompts.train) if prompts else Counter[str]()
    evaluated = Counter(prompt.data_source for prompt in prompts.validation) if prompts else Counter[str]()
    quotas = source_quotas(weights, served.total()) if weights and prompts else dict(served)
    return DataSurvey(
        train=_by_source(read.train, served, quotas),
        validation=_by_source(read.validation, evaluated, {}),
        weights=dict(weights),
        repeats=count_repeats(prompts) if prompts else None,
        example=_example(prompts, read.tokenizer) if prompts else None,
    )


def _by_source(encoded: Sequence[EncodedRow], used: Mapping[str, int], quotas: Mapping[str, int]) -> list[SourceSurvey]:
    sources: dict[str, list[EncodedRow]] = {}
    for item in encoded:
        sources.setdefault(item.row.data_source, []).append(item)
    return [_survey(name, sources[name], used.get(name, 0), quotas) for name in sorted(sources)]


def _survey(name: str, items: Sequence[EncodedRow], num_used: int, quotas: Mapping[str, int]) -> SourceSurvey:
    fits = Counter(item.fit for item in items)
    lengths = [item.num_tokens for item in items]
    p50, p90, p99 = (int(value) for value in np.percentile(lengths, (50, 90, 99), method="higher"))
    quota, total = quotas.get(name, 0), sum(quotas.values())
    return SourceSurvey(
        data_source=name,
        num_rows=len(items),
        num_used=num_used,
        num_filtered=fits[Fit.FILTERED],
        num_truncated=fits[Fit.TRUNCATED],
        num_refused=fits[Fit.REFUSED],
        p50_tokens=p50,
        p90_tokens=p90,
        p99_tokens=p99,
        max_tokens=max(lengths),
        share=quota / total if total else None,
        times_served=quota / num_used if total and num_used else None,
    )


def _example(prompts: PromptSet, tokenizer: Any) -> Example:
    prompt = prompts.train[0]
    text = str(tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False))
    return Example(prompt.prompt_id, text, len(prompt.token_ids), prompt.ground_truth)
