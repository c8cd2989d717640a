"""The base policy: its cache is whole or absent, keyed by all that determines it, and the policy suits the demo."""

import json
import shutil
from dataclasses import replace
from io import StringIO
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from transformers import Qwen3ForCausalLM

from deploy.demo import base_policy, task
from deploy.demo.base_policy import default_cache_dir, make_base_policy, policy_folder
from deploy.demo.measure import measure_policy
from deploy.demo.progress import report, reporting
from deploy.demo.teaching import Recipe, TeachingProgress, flawed_solution, train
from protocol.manifest import verify_manifest

TINY = Recipe(num_solution_steps=3, num_flaw_steps=1, batch_tokens=64, pool_size=16)


@pytest.fixture(scope="module")
def tiny_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache_dir = tmp_path_factory.mktemp("cache")
    make_base_policy(cache_dir, 0, recipe=TINY)
    return cache_dir


def _copy(tiny_cache: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_cache, tmp_path / "copy"))


def test_the_folder_is_a_whole_policy_and_nothing_else_is_left(tiny_cache: Path) -> None:
    folder = policy_folder(tiny_cache, 0, TINY)
    assert list(tiny_cache.iterdir()) == [folder]
    assert verify_manifest(folder).step == 0
    assert Qwen3ForCausalLM.from_pretrained(folder).num_parameters() < 1_000_000
    assert (folder / "tokenizer.json").is_file()


def test_a_policy_that_is_there_is_not_made_again(tiny_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_policy, "train", lambda *_: pytest.fail("trained again"))
    assert make_base_policy(tiny_cache, 0, recipe=TINY) == policy_folder(tiny_cache, 0, TINY)


def test_the_key_covers_seed_recipe_and_task(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path("cache")
    folders = {policy_folder(root, 0, TINY), policy_folder(root, 1, TINY)}
    for change in ({"num_flaw_steps": 2}, {"matrix_lr": 0.01}, {"early_stop_share": 0.25}):
        folders.add(policy_folder(root, 0, replace(TINY, **change)))
    monkeypatch.setattr(task, "MIXTURE", ((1.0, 2, 3),))
    folders.add(policy_folder(root, 0, TINY))
    assert len(folders) == 6
    assert policy_folder(root, 0, TINY) == policy_folder(root, 0, replace(TINY))


def test_a_making_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(update: TeachingProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_base_policy(tmp_path, 0, interrupt, TINY)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_policy_is_made_again(tiny_cache: Path, tmp_path: Path) -> None:
    cache_dir = _copy(tiny_cache, tmp_path)
    weights = policy_folder(cache_dir, 0, TINY) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    make_base_policy(cache_dir, 0, recipe=TINY)
    assert weights.read_bytes() == whole  # and equal, because nothing but seed and recipe determines it


def test_of_two_processes_that_make_it_at_once_both_get_the_first_one(
    tiny_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(seed: int, recipe: Recipe, progress: object) -> Qwen3ForCausalLM:
        model = train(seed, recipe, lambda _: None)
        shutil.copytree(policy_folder(tiny_cache, 0, TINY), policy_folder(tmp_path, 0, TINY))
        return model

    monkeypatch.setattr(base_policy, "train", overtaken)
    folder = make_base_policy(tmp_path, 0, recipe=TINY)
    assert list(tmp_path.iterdir()) == [folder]
    verify_manifest(folder)


def test_the_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "april"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for invalid in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", invalid)
        assert default_cache_dir() == tmp_path / "home" / ".cache" / "april"


def test_training_leaves_the_number_of_threads_as_it_was() -> None:
    before = torch.get_num_threads()
    train(0, TINY, lambda _: None)
    assert torch.get_num_threads() == before


def test_the_flaw_has_its_shares_and_reports_the_running_sum() -> None:
    items = list(islice(task.chain_sums(9, held_out=False), 1000))
    recipe, rng = Recipe(early_stop_share=0.4, direct_answer_share=0.1), Random(0)
    kinds = {"early": 0, "direct": 0, "whole": 0}
    for item in items:
        written = flawed_solution(item, recipe, rng)
        stops = {item.solution(count) for count in range(1, len(item.terms))}
        kind = "whole" if written == item.solution() else "direct" if written == item.solution(0) else "early"
        assert kind != "early" or written in stops
        kinds[kind] += 1
    for kind, share in (("early", 0.4), ("direct", 0.1), ("whole", 0.5)):
        assert abs(kinds[kind] / 1000 - share) < 4 * (share * (1 - share) / 1000) ** 0.5


def test_learning_rates_warm_up_and_then_only_fall_to_zero() -> None:
    recipe = Recipe()
    scales = [recipe.lr_scale(step) for step in range(recipe.num_steps)]
    assert scales[0] == 1 / recipe.num_warmup_steps
    assert scales[: recipe.num_warmup_steps] == sorted(scales[: recipe.num_warmup_steps])
    assert scales[recipe.num_warmup_steps :] == sorted(scales[recipe.num_warmup_steps :], reverse=True)
    assert scales[recipe.num_solution_steps] == recipe.flaw_lr_scale
    assert 0 < scales[-1] < 0.02 * max(scales) == 0.02


UPDATE = TeachingProgress("worked solutions", 10, 20, 0.5, 1.0)


def test_progress_is_json_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with reporting("base policy", Console(file=StringIO())) as progress:
        progress(UPDATE)
    report({"reward": 0.25}, Console(file=StringIO()))
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["making"], first["step"], first["num_steps"], first["loss"]) == ("base policy", 10, 20, 0.5)
    assert second == {"reward": 0.25}


def test_progress_is_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    with reporting("base policy", console) as progress:
        progress(UPDATE)
    report({"reward": 0.25}, console)
    assert "worked solutions" in screen.getvalue()
    assert "10/20" in screen.getvalue()
    assert "0.250" in screen.getvalue()
    assert capsys.readouterr().out == ""


def test_the_command_measures_what_it_made(tiny_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_policy, "Recipe", lambda: TINY)
    done = CliRunner().invoke(
        base_policy.main, ["--cache-dir", str(tiny_cache), "--num-samples", "2"], catch_exceptions=False
    )
    sampled, greedy = map(json.loads, done.stdout.splitlines())
    assert sampled["path"] == str(policy_folder(tiny_cache, 0, TINY))
    assert (sampled["temperature"], greedy["temperature"]) == (1.0, 0.0)
    assert sampled["num_samples"] == 2


@pytest.mark.slow
def test_the_base_policy_leaves_room_to_learn_and_has_a_long_tail(tmp_path: Path) -> None:
    measured = measure_policy(make_base_policy(tmp_path, seed=0), num_samples=512)
    assert 0.2 < measured.mean_reward < 0.6
    assert measured.tail >= 4
    assert measured.ended_share > 0.95
    assert measured.p50_tokens >= 15  # a tail over next to nothing would be no tail
