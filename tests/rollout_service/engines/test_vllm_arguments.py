"""Settings to vLLM's arguments, what a model folder says of itself, and the worker's own reading of weights."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from protocol.errors import EngineError, SettingsError
from rollout_service.engines import vllm_worker
from rollout_service.engines.checkpoint import checkpoint_files, end_token_ids, kv_bytes_per_token, read_config
from rollout_service.engines.streams import MAX_EARLY_ABORTS, StreamTable
from rollout_service.engines.vllm_arguments import (
    MAX_DEFAULT_KV_BYTES,
    child_environment,
    engine_arguments,
    engine_seed,
)
from rollout_service.engines.vllm_engine import VllmEngine
from rollout_service.engines.vllm_outputs import sampling_parameters
from tests.support.engines import engine_settings, request


def test_cpu_defaults(tiny_model_dir):
    arguments = engine_arguments(engine_settings(tiny_model_dir, max_num_seqs=8), on_cpu=True, seed=1)
    assert arguments["dtype"] == "float32"
    assert arguments["enforce_eager"] is True
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert arguments["max_num_seqs"] == 8
    assert arguments["max_model_len"] == 256
    # 8 sequences of two blocks and two to spare; 3 layers, keys and values, 2 heads of 32, float32
    assert arguments["kv_cache_memory_bytes"] == (8 * 2 + 2) * 128 * (2 * 3 * 2 * 32 * 4)


def test_gpu_defaults_leave_memory_dtype_and_compilation_to_vllm(tiny_model_dir):
    arguments = engine_arguments(engine_settings(tiny_model_dir), on_cpu=False, seed=1)
    assert arguments["dtype"] == "auto"
    assert arguments["enforce_eager"] is False
    assert "kv_cache_memory_bytes" not in arguments


def test_what_is_set_is_taken_and_extra_wins(tiny_model_dir):
    settings = engine_settings(
        tiny_model_dir,
        kv_cache_memory_bytes=123,
        enforce_eager=False,
        dtype="bfloat16",
        max_num_batched_tokens=512,
        extra={"block_size": 64, "seed": 9},
    )
    arguments = engine_arguments(settings, on_cpu=True, seed=1)
    assert [arguments[name] for name in ("kv_cache_memory_bytes", "enforce_eager", "dtype")] == [123, False, "bfloat16"]
    assert [arguments[name] for name in ("max_num_batched_tokens", "block_size", "seed")] == [512, 64, 9]


def test_kv_cache_is_capped_but_holds_one_sequence(tmp_path):
    config = {"model_type": "qwen3", "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": 128, "hidden_size": 4096}))
    assert kv_bytes_per_token(read_config(tmp_path), 2) == 147_456  # Qwen3-8B in bfloat16
    many = engine_arguments(engine_settings(tmp_path, max_num_seqs=256), on_cpu=True, seed=1)
    assert many["kv_cache_memory_bytes"] == MAX_DEFAULT_KV_BYTES
    long = engine_arguments(engine_settings(tmp_path, max_model_len=40_960), on_cpu=True, seed=1)
    assert long["kv_cache_memory_bytes"] > 40_960 * 2 * 147_456


def test_seeds_differ_between_replicas_and_lives():
    seeds = {engine_seed(run, worker, life) for run in (0, 1) for worker in ("a", "b") for life in (0, 1)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_the_environment_of_the_child_does_not_stay(tiny_model_dir, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    with child_environment(engine_settings(tiny_model_dir), on_cpu=True, eager=True):
        assert (os.environ["OMP_NUM_THREADS"], os.environ["TORCHDYNAMO_DISABLE"]) == ("1", "1")
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert "TORCHDYNAMO_DISABLE" not in os.environ


def test_end_tokens_come_from_both_configs(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "eos_token_id": 5}')
    assert end_token_ids(tmp_path) == (5,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    assert end_token_ids(tmp_path) == (5, 7)


def test_an_index_names_the_files_of_a_checkpoint(tmp_path):
    (tmp_path / "consolidated.safetensors").touch()
    (tmp_path / "model-1.safetensors").touch()
    assert checkpoint_files(tmp_path) == ["consolidated.safetensors", "model-1.safetensors"]
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    assert checkpoint_files(tmp_path) == ["model-1.safetensors"]


def test_every_request_has_sampling_parameters_of_its_own(vllm_loaded):
    item = request("a@1", [1], 7, 0.5, stop_token_ids=(3,))
    first, second = sampling_parameters(item, (2, 3)), sampling_parameters(item, (2, 3))
    assert first is not second
    first.stop_token_ids.append(99)
    assert second.stop_token_ids == [3, 2]
    assert (second.max_tokens, second.temperature, second.top_k, second.logprobs, second.seed) == (7, 0.5, 0, 0, None)


@pytest.mark.parametrize(
    ("folder", "message"),
    [("missing", "does not exist"), ("empty", "no Hugging Face model"), ("no-weights", "save_pretrained")],
)
async def test_a_folder_that_is_no_model_is_refused_in_one_sentence(tmp_path, folder, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "no-weights").mkdir()
    (tmp_path / "no-weights" / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(EngineError, match=message):
        await VllmEngine(engine_settings(tmp_path / folder), "e").start()


def test_a_model_must_be_named():
    with pytest.raises(SettingsError, match=r"model\.path"):
        VllmEngine(engine_settings(None), "e")


async def test_what_vllm_refuses_is_one_sentence(vllm_loaded, tiny_model_dir):
    with pytest.raises(EngineError, match=r"engine\.extra.*no_such_argument"):
        await VllmEngine(engine_settings(tiny_model_dir, extra={"no_such_argument": 1}), "e").start()
    with pytest.raises(EngineError, match="max_model_len") as caught:
        await VllmEngine(engine_settings(tiny_model_dir, max_model_len=4096), "e").start()
    assert "\n" not in str(caught.value)


def test_the_worker_reads_what_safetensors_wrote(tmp_path):
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).to(torch.bfloat16),
        "c": torch.zeros(0, 4),
        "odd": torch.arange(3, dtype=torch.uint8),
        "after-odd": torch.randn(2, 2, dtype=torch.float64),
    }
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    read = dict(vllm_worker._parse_safetensors(bytearray(path.read_bytes())))
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_a_stale_output_layer_is_found():
    """What vLLM does to tied embeddings on CPU: the weight is new, the packed copy that computes is old."""
    old, new = torch.randn(512, 32), torch.randn(512, 32)

    def model_that_computes_with(weight):
        head = SimpleNamespace(weight=new, quant_method=SimpleNamespace(apply=lambda _, inputs: inputs @ weight.T))
        return SimpleNamespace(lm_head=head)

    loaded = vllm_worker._Loaded(embedding=new[: vllm_worker.PROBE_ROWS])
    vllm_worker._probe_output_layer(model_that_computes_with(new), loaded, first_rank=True)
    with pytest.raises(vllm_worker.RefusedWeightsError, match="output layer"):
        vllm_worker._probe_output_layer(model_that_computes_with(old), loaded, first_rank=True)


def test_early_aborts_are_bounded():
    table = StreamTable[int]()
    for index in range(MAX_EARLY_ABORTS + 1):
        table.remember_abort(f"s{index}@1")
    assert not table.open("s0@1", 0)
    assert table.open(f"s{MAX_EARLY_ABORTS}@1", 0)


@pytest.mark.slow
async def test_no_engine_outlives_a_killed_service(vllm_loaded, tmp_path, tiny_model_dir: Path):
    import asyncio
    import signal
    import sys

    import psutil

    script = tmp_path / "service.py"
    script.write_text(
        "import asyncio, pathlib\n"
        "from rollout_service.engines.vllm_engine import VllmEngine\n"
        "from tests.support.engines import engine_settings\n"
        "async def main():\n"
        f"    engine = VllmEngine(engine_settings(pathlib.Path({str(tiny_model_dir)!r})), 'e')\n"
        "    await engine.start()\n"
        "    print('core', *engine.process_ids, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n"
    )
    root = Path(__file__).parents[3]
    service = await asyncio.create_subprocess_exec(
        sys.executable, str(script), stdout=asyncio.subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(root)}
    )
    assert service.stdout is not None
    while not (line := (await service.stdout.readline()).decode()).startswith("core "):
        assert line, "the service ended before its engine ran"
    core = psutil.Process(int(line.split()[1]))
    os.kill(service.pid, signal.SIGKILL)
    await service.wait()
    await asyncio.to_thread(core.wait, 30)
