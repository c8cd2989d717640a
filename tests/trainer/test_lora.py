"""Adapters: only they train, what is published is what they compute, and off they leave the model as it was."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from protocol.errors import SettingsError
from tests.trainer.factory import make_settings
from tests.trainer.rank_cases import Case, micro_batches, run_case, train_step
from trainer.adapters import ADAPTER_FOLDER
from trainer.deepspeed_config import start_deepspeed
from trainer.distributed import Ranks
from trainer.engine import PolicyEngine
from trainer.model import load_policy
from trainer.publish import WEIGHTS_NAME
from trainer.reference import AdaptersOffReference, ReferenceModel, make_reference
from trainer.weights_file import write_weights

CPU = torch.device("cpu")
LORA: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 32}
pytestmark = pytest.mark.filterwarnings("ignore:.torch.*is deprecated")


def make_engine(model_dir: Path, folder: Path, zero_stage: int = 0, **model: Any) -> PolicyEngine:
    sections = {"model": {"path": model_dir} | LORA | model, "deepspeed": {"zero_stage": zero_stage}}
    settings = make_settings(model_dir, folder, **sections)
    device = start_deepspeed()
    return PolicyEngine(settings, load_policy(settings, model_dir, device, adapters=True), Ranks(30), device)


def train_steps(engine: PolicyEngine, model_dir: Path, folder: Path, steps: int) -> None:
    ranks = Ranks(30)
    for step in range(1, steps + 1):
        train_step(engine, *micro_batches(step, ranks), make_settings(model_dir, folder), ranks)


def logprobs_of(engine: PolicyEngine) -> torch.Tensor:
    engine.train(False)
    micros, _ = micro_batches(9, Ranks(30))
    return torch.cat([engine.logprobs(micro) for micro in micros])


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_the_published_folder_computes_what_the_adapters_compute(
    tiny_model_dir: Path, tmp_path: Path, zero_stage: int
) -> None:
    engine = make_engine(tiny_model_dir, tmp_path, zero_stage)
    base = load_policy(make_settings(tiny_model_dir, tmp_path), tiny_model_dir, CPU)
    micros, _ = micro_batches(9, Ranks(30))
    untrained = torch.cat([base(micro).logprobs for micro in micros])
    torch.testing.assert_close(logprobs_of(engine), untrained, rtol=0, atol=1e-6)

    train_steps(engine, tiny_model_dir, tmp_path, 3)
    served = tmp_path / "served"
    served.mkdir()
    write_weights(served / WEIGHTS_NAME, engine.weight_shapes(), engine.named_weights())
    (served / "config.json").write_bytes((tiny_model_dir / "config.json").read_bytes())
    assert set(load_file(served / WEIGHTS_NAME)) == set(load_file(tiny_model_dir / WEIGHTS_NAME)) - {"lm_head.weight"}
    plain = load_policy(make_settings(served, tmp_path), served, CPU)
    adapted = logprobs_of(engine)
    torch.testing.assert_close(torch.cat([plain(micro).logprobs for micro in micros]), adapted, rtol=0, atol=2e-5)
    assert (adapted - untrained).abs().max() > 1e-2, "the adapters have learned something to publish"


def test_only_adapters_train_and_off_they_leave_the_reference_as_it_was(tiny_model_dir: Path, tmp_path: Path) -> None:
    engine = make_engine(tiny_model_dir, tmp_path, target_modules=["q_proj", "v_proj"])
    settings = make_settings(tiny_model_dir, tmp_path, model={"path": tiny_model_dir} | LORA)
    micros, _ = micro_batches(9, Ranks(30))
    reference = make_reference(settings, engine, CPU)
    assert isinstance(reference, AdaptersOffReference)
    elsewhere = settings.model_copy(update={"ref": settings.ref.model_copy(update={"path": tiny_model_dir})})
    separate = make_reference(elsewhere, engine, CPU)
    assert isinstance(separate, ReferenceModel)
    frozen = {n: p.clone() for n, p in engine.policy.named_parameters() if not p.requires_grad}

    train_steps(engine, tiny_model_dir, tmp_path, 2)
    trained = [n for n, p in engine.policy.named_parameters() if p.requires_grad]
    assert len(trained) == 3 * 2 * 2, "two matrices beside two layers in each of three blocks"
    assert all(torch.equal(p, frozen[n]) for n, p in engine.policy.named_parameters() if n in frozen)
    expected = separate.logprobs(micros)
    for actual, wanted in zip(reference.logprobs(micros), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0)
    assert (logprobs_of(engine) - torch.cat(expected)).abs().max() > 1e-3, "afterwards they are on again"


def test_the_checkpoint_holds_the_adapter_alone_and_peft_reads_it(tiny_model_dir: Path, tmp_path: Path) -> None:
    sections = {"model": {"path": tiny_model_dir} | LORA}
    case = Case("lora", str(tmp_path / "run"), sections=sections)
    saved = run_case(case, tiny_model_dir, tmp_path)
    again = run_case(Case("again", case.run_dir, steps=1, save=False, sections=sections), tiny_model_dir, tmp_path)
    assert again.first_step == 3
    assert all(torch.equal(again.before[name], saved.after[name]) for name in saved.after)

    folder = tmp_path / "run" / "trainer" / "checkpoints" / "step-000002"
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert size < (tiny_model_dir / WEIGHTS_NAME).stat().st_size, "the base weights are not in it"
    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    adapted: Any = PeftModel.from_pretrained(plain, folder / ADAPTER_FOLDER)
    merged = adapted.merge_and_unload().state_dict()
    for name, weight in saved.after.items():
        torch.testing.assert_close(merged[name], weight, rtol=0, atol=1e-6)


def test_half_precision_publishes_its_own_dtype(tiny_model_dir: Path, tmp_path: Path) -> None:
    engine = make_engine(tiny_model_dir, tmp_path, dtype="bfloat16")
    train_steps(engine, tiny_model_dir, tmp_path, 1)
    shapes = engine.weight_shapes()
    for name, weight in engine.named_weights():
        assert (weight.dtype, tuple(weight.shape)) == shapes[name]
        assert weight.dtype == torch.bfloat16


@pytest.mark.parametrize("target", [["lm_head"], ["embed_tokens"], ["no_such_layer"]])
def test_layers_that_can_not_carry_an_adapter_are_refused(tiny_model_dir: Path, tmp_path: Path, target: Any) -> None:
    with pytest.raises(SettingsError, match="target_modules"):
        make_engine(tiny_model_dir, tmp_path, target_modules=target)


def test_a_gradient_that_is_not_finite_changes_no_adapter(tiny_model_dir: Path, tmp_path: Path) -> None:
    engine = make_engine(tiny_model_dir, tmp_path)
    train_steps(engine, tiny_model_dir, tmp_path, 1)
    before = logprobs_of(engine)
    micros, _ = micro_batches(2, Ranks(30))
    engine.train(True)
    assert not engine.backward(engine.forward(micros[0]).logprobs.sum() * float("nan"))
    engine.update(1e-3, skip=True)
    torch.testing.assert_close(logprobs_of(engine), before, rtol=0, atol=0)
