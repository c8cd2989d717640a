"""Fixtures that several folders share."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 3-layer model with a byte tokenizer, in float32."""
    from deploy.demo.byte_model import make_model, save_policy

    folder = tmp_path_factory.mktemp("tiny-model")
    save_policy(make_model(seed=0), folder)
    return folder
