"""Loads vLLM once, before any test: its imports raise deprecation warnings of torch, which are not ours to fix."""

import warnings

import pytest


@pytest.fixture(scope="session")
def vllm_loaded() -> None:
    """vLLM is imported, in the environment that the engine gives it."""
    from rollout_service.engines.vllm_arguments import prepare_environment

    prepare_environment()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.engine.arg_utils
        import vllm.v1.engine.async_llm  # noqa: F401
