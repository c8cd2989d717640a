"""reasoning-gym, imported once, where it is needed."""

import importlib
import json
import warnings
from functools import lru_cache
from typing import Any

from protocol.errors import DataError

DATA_SOURCE_PREFIX = "reasoning_gym/"
NO_GENERATORS = frozenset({"composite"})  # it mixes other generators, which `data.reasoning_gym` does itself


def generator_names() -> list[str]:
    """Names of all generators."""
    return sorted(set(_factory().DATASETS) - NO_GENERATORS)


def make_generator(name: str, settings: dict[str, Any]) -> Any:
    """A generator by name and settings. Raises DataError with the generator's own complaint."""
    factory = _factory()
    if name not in factory.DATASETS or name in NO_GENERATORS:
        import difflib

        near = difflib.get_close_matches(name, generator_names(), n=3, cutoff=0.3)
        raise DataError(f"reasoning-gym has no generator {name!r}; near names: {', '.join(near) or 'none'}")
    try:
        return factory.create_dataset(name, **settings)
    except (TypeError, ValueError, AssertionError, KeyError, AttributeError) as error:
        raise DataError(f"reasoning-gym refuses the settings of {name}: {error}") from error


def scoring_generator(name: str, settings: dict[str, Any]) -> Any:
    """The generator whose `score_answer` judges entries that were made with these settings."""
    return _scoring_generator(name, json.dumps(settings, sort_keys=True))


@lru_cache(maxsize=64)
def _scoring_generator(name: str, settings: str) -> Any:
    return make_generator(name, json.loads(settings))


@lru_cache(maxsize=1)
def _factory() -> Any:
    try:
        with warnings.catch_warnings():
            # One of its dependencies compares with `is`, which Python warns about when it compiles the file.
            warnings.simplefilter("ignore", SyntaxWarning)
            importlib.import_module("reasoning_gym")
            return importlib.import_module("reasoning_gym.factory")
    except ImportError as error:
        raise DataError(f"reasoning-gym can't be imported ({error}); install april-rollout[service]") from error
