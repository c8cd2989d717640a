"""The real engine on CPU in float32: resume, log-probs, aborts, installs that succeed and installs that must not."""

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from safetensors.torch import load_file, save_file

from protocol.errors import EngineDeadError, EngineError, WeightsError
from protocol.manifest import read_manifest, write_manifest
from rollout_service.engines import vllm_weights
from rollout_service.engines.interface import StreamEnd
from rollout_service.engines.vllm_engine import VllmEngine
from tests.support.engines import (
    Collected,
    Reference,
    collect,
    engine_settings,
    generate_all,
    make_policy,
    random_prompts,
    request,
    until,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_RESUMES = 60
TIE = 1e-4  # two best tokens closer than this may change places between two runs in float32
MAX_MEAN_LOGPROB_ERROR = 1e-4
LONG_PROMPT = random_prompts(1, 150, seed=9)[0]  # longer than a KV block, so that the prefix cache would reuse it


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policies") / "base", seed=0)


@pytest.fixture(scope="module")
def reference(base) -> Reference:
    return Reference(base)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(vllm_loaded, base):
    engine = VllmEngine(engine_settings(base, max_num_seqs=64), "engine-0")
    await engine.start()
    yield engine
    await engine.close()


async def test_start_is_version_0_and_seeds_are_refused_on_cpu(engine):
    stats = engine.stats()
    assert (stats.version, stats.epoch, stats.alive, stats.slots, stats.num_running) == (0, 1, True, 64, 0)
    assert not engine.takes_seeds
    with pytest.raises(EngineError, match="seed"):
        await collect(engine.generate(request("seeded@1", [1, 2], seed=3)))


async def test_a_parked_greedy_response_goes_on_as_if_it_had_not_been_cut(engine, reference):
    prompts = random_prompts(NUM_RESUMES, 24, seed=1)
    whole = await generate_all(engine, [request(f"whole-{i}@1", p, 96, 0.0) for i, p in enumerate(prompts)])
    assert np.mean([len(set(item.tokens)) for item in whole]) > 20, "the greedy output must vary to prove anything"
    cuts = np.random.default_rng(2).integers(1, 90, NUM_RESUMES)

    async def cut(index: int) -> Collected:
        name, parked, sent = f"cut-{index}@1", Collected(), False
        async for chunk in engine.generate(request(name, prompts[index], 96, 0.0)):
            parked.chunks.append(chunk)
            if not sent and len(parked.tokens) >= cuts[index]:
                sent = True
                await engine.abort([name])
        return parked

    parked = await asyncio.gather(*(cut(index) for index in range(NUM_RESUMES)))
    aborted = [i for i, item in enumerate(parked) if item.end is StreamEnd.ABORT]
    assert len(aborted) >= 50
    assert all(len(parked[i].tokens) >= cuts[i] for i in aborted)
    resumed = await generate_all(
        engine,
        [request(f"cut-{i}@2", prompts[i], 96 - len(parked[i].tokens), 0.0, prefix=parked[i].tokens) for i in aborted],
    )
    for i, rest in zip(aborted, resumed, strict=True):
        both, uncut = parked[i].tokens + rest.tokens, whole[i].tokens
        differ = next((at for at, pair in enumerate(zip(both, uncut, strict=False)) if pair[0] != pair[1]), None)
        if differ is None:
            assert both == uncut
        else:
            assert reference.gap_of_best_two([*prompts[i], *uncut[:differ]]) < TIE


async def test_sampled_logprobs_are_those_of_the_tempered_policy(engine, reference):
    prompts = random_prompts(24, 20, seed=3)
    sampled = await generate_all(engine, [request(f"warm-{i}@1", p, 64, 0.7) for i, p in enumerate(prompts)])
    errors = [
        np.abs(item.logprobs - reference.logprobs(prompt, item.tokens, 0.7))
        for prompt, item in zip(prompts, sampled, strict=True)
    ]
    assert np.mean(np.concatenate(errors)) <= MAX_MEAN_LOGPROB_ERROR
    untempered = reference.logprobs(prompts[0], sampled[0].tokens, 1.0)
    assert np.mean(np.abs(sampled[0].logprobs - untempered)) > 0.05, "the temperature must matter to prove anything"


async def test_no_two_samples_of_a_prompt_are_twins(engine):
    samples = await generate_all(engine, [request(f"twin-{i}@1", [7, 8, 9], 32) for i in range(32)])
    assert len({tuple(sample.tokens) for sample in samples}) == 32


async def test_the_budget_is_exact_and_ends_with_length(engine):
    ends = await generate_all(engine, [request(f"budget-{n}@1", [5, 6], n, 0.0) for n in (1, 2, 17)])
    assert [(len(item.tokens), item.end) for item in ends] == [(n, StreamEnd.LENGTH) for n in (1, 2, 17)]


async def test_what_requests_hold_of_the_kv_cache_is_told(engine):
    requests = [request(f"kv-{i}@1", prompt, 96) for i, prompt in enumerate(random_prompts(8, 24, seed=5))]
    running = asyncio.create_task(generate_all(engine, requests))
    await until(lambda: (engine.stats().kv_use or 0.0) > 0.0)
    await running
    assert engine.stats().kv_use <= 1.0
    assert engine.stats().num_preemptions == 0


async def test_the_end_token_is_part_of_the_response(engine):
    (free,) = await generate_all(engine, [request("free@1", [3, 1, 4], 20, 0.0)])
    stop = free.tokens[7]
    first = free.tokens.index(stop)
    (stopped,) = await generate_all(engine, [request("stopped@1", [3, 1, 4], 20, 0.0, stop_token_ids=(stop,))])
    assert stopped.tokens == free.tokens[: first + 1]
    assert stopped.end is StreamEnd.STOP


async def test_an_abort_is_never_lost_however_early_it_comes(engine):
    await engine.abort(["early@1"])
    early = await collect(engine.generate(request("early@1", [1, 2], 96)))
    assert (early.tokens, early.end) == ([], StreamEnd.ABORT)
    for delay in range(8):  # every turn of the event loop between the first step of the stream and its registration
        name = f"racing-{delay}@1"
        racing = asyncio.create_task(collect(engine.generate(request(name, [1, 2, 3], 96))))
        for _ in range(delay):
            await asyncio.sleep(0)
        await engine.abort([name])
        assert (await racing).end is StreamEnd.ABORT
    await engine.wait_idle()
    assert engine.stats().num_running == 0


async def test_many_aborts_at_once_end_every_stream(engine):
    names = [f"many-{i}@1" for i in range(120)]  # more than there are slots: some are queued in the engine
    streams = [asyncio.create_task(collect(engine.generate(request(name, [4, 5], 96)))) for name in names]
    await until(lambda: engine.stats().tokens_generated > 0 and engine.stats().num_running == len(names))
    await engine.abort(names)
    ends = {item.end for item in await asyncio.gather(*streams)}
    assert ends <= {StreamEnd.ABORT, StreamEnd.STOP}
    assert StreamEnd.ABORT in ends
    await asyncio.wait_for(engine.wait_idle(), 10)


async def test_a_closed_stream_frees_its_slot(engine):
    stream = engine.generate(request("left@1", [4, 5], 96))
    await anext(stream)
    await stream.aclose()
    await asyncio.wait_for(engine.wait_idle(), 10)


async def test_one_id_runs_once(engine):
    stream = engine.generate(request("once@1", [4, 5], 96))
    await anext(stream)
    with pytest.raises(EngineError, match="runs already"):
        await anext(engine.generate(request("once@1", [4, 5], 96)))
    await stream.aclose()


async def test_requests_that_cannot_fit_are_refused_with_what_to_do(engine):
    with pytest.raises(EngineError, match="max_model_len"):
        await collect(engine.generate(request("long@1", LONG_PROMPT, 200)))
    with pytest.raises(EngineError, match="budget"):
        await collect(engine.generate(request("spent@1", [1], 0)))
    assert engine.stats().num_running == 0


async def test_install_with_running_requests_is_refused_while_prefixes_are_cached(engine, base):
    stream = engine.generate(request("running@1", [4, 5], 96))
    await anext(stream)
    with pytest.raises(EngineError, match="park them"):
        await engine.install(base, 1)
    assert (await collect(stream)).tokens, "the stream goes on"
    assert engine.stats().version == 0


# The tests below change weights, in this order.


async def test_refused_weights_leave_the_old_ones_exactly(engine, tmp_path, monkeypatch):
    before = await _answers(engine, "before")
    for index, (folder, message) in enumerate(_bad_folders(tmp_path)):
        with pytest.raises(WeightsError, match=message):
            await engine.install(folder, 1)
        assert engine.stats().version == 0
        assert await _answers(engine, f"refused-{index}") == before


async def test_a_file_that_changes_between_check_and_load_is_undone(engine, tmp_path, monkeypatch):
    """The workers see the fault with half of the new weights loaded already."""
    before = await _answers(engine, "before-change")
    folder = make_policy(tmp_path / "changed", seed=5, max_shard_size="500KB")
    names = [file.name for file in read_manifest(folder).files]
    assert len(names) > 1
    _flip_last_byte(folder / names[-1])
    monkeypatch.setattr(vllm_weights, "verify_manifest", read_manifest)
    with pytest.raises(WeightsError, match="changed while it was loaded"):
        await engine.install(folder, 1)
    assert engine.stats().version == 0
    assert await _answers(engine, "after-change") == before


async def test_new_weights_answer_and_nothing_of_the_old_is_reused(engine, tmp_path):
    await _answers(engine, "fills-the-prefix-cache")
    folder = make_policy(tmp_path / "new", seed=11)
    await engine.install(folder, 3)
    assert engine.stats().version == 3
    new = Reference(folder)
    (sample,) = await generate_all(engine, [request("new@1", LONG_PROMPT, 64, 0.8)])
    assert set(sample.versions) == {3}
    errors = np.abs(sample.logprobs - new.logprobs(LONG_PROMPT, sample.tokens, 0.8))
    assert np.mean(errors) <= MAX_MEAN_LOGPROB_ERROR


async def test_revert_goes_back_to_the_model_as_it_started(engine, reference):
    await engine.revert()
    assert engine.stats().version == 0
    (sample,) = await generate_all(engine, [request("reverted@1", LONG_PROMPT, 64, 0.8)])
    errors = np.abs(sample.logprobs - reference.logprobs(LONG_PROMPT, sample.tokens, 0.8))
    assert np.mean(errors) <= MAX_MEAN_LOGPROB_ERROR


async def test_a_closed_engine_says_so(engine):
    stream = asyncio.create_task(collect(engine.generate(request("open@1", [4, 5], 96))))
    await until(lambda: engine.stats().num_running > 0)
    await engine.close()
    with pytest.raises(EngineDeadError):
        await stream
    with pytest.raises(EngineDeadError, match="restart"):
        await collect(engine.generate(request("late@1", [4, 5], 96)))
    assert not engine.stats().alive


async def _answers(engine: VllmEngine, name: str) -> list[tuple[list[int], list[float]]]:
    prompts = [LONG_PROMPT, *random_prompts(3, 12, seed=21)]
    items = await generate_all(engine, [request(f"{name}-{i}@1", p, 24, 0.0) for i, p in enumerate(prompts)])
    return [(item.tokens, [round(float(value), 3) for value in item.logprobs]) for item in items]


def _bad_folders(root: Path):
    good = make_policy(root / "good", seed=6)

    def copy(name: str) -> Path:
        return Path(shutil.copytree(good, root / name))

    unfinished = copy("unfinished")
    (unfinished / "manifest.json").unlink()
    yield unfinished, "manifest"
    corrupted = copy("corrupted")
    _flip_last_byte(corrupted / "model.safetensors")
    yield corrupted, "checksum"
    yield root / "nowhere", "manifest"
    for name, change, message in (
        ("missing", lambda tensors: tensors.pop("model.norm.weight"), "lacks tensor model.norm.weight"),
        ("unknown", lambda tensors: tensors.update(extra=tensors["model.norm.weight"].clone()), "unknown tensor extra"),
        ("misshapen", lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"][:5]}), "shape"),
    ):
        folder = copy(name)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")
        write_manifest(folder, step=6)
        yield folder, message
    text = copy("text")
    (text / "model.safetensors").write_text("not a safetensors file at all")
    write_manifest(text, step=6)
    yield text, "no safetensors file"


def _flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x40
    path.write_bytes(content)
