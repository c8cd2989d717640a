"""Checkpoints that two trainers of one run write: the one that was superseded takes nothing away."""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.errors import SettingsError, TrainingError
from tests.trainer.factory import make_settings
from trainer.checkpoint import Checkpoints


class OneRank:
    """`Ranks` of a trainer that is alone."""

    is_main, rank = True, 0

    def __init__(self, size: int = 1) -> None:
        self.size = size

    def share(self, value):
        return value

    def barrier(self) -> None: ...

    def largest(self, values):
        return values


class Engine:
    """Saves one file; `meanwhile` happens in the middle of it."""

    def __init__(self, weights: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        self._weights = weights
        self._meanwhile = meanwhile

    def save(self, folder: Path) -> None:
        (folder / "weights").write_text(self._weights)
        self._meanwhile()

    def load(self, folder: Path, same_ranks: bool) -> None:
        self.same_ranks = same_ranks
        self.loaded = (folder / "weights").read_text()


@pytest.fixture
def checkpoints(tmp_path) -> Checkpoints:
    return Checkpoints(make_settings(tmp_path, tmp_path), OneRank())


def at(checkpoints: Checkpoints, step: int):
    return checkpoints.new_state().model_copy(update={"step": step})


def test_a_superseded_trainer_that_wakes_in_a_save_leaves_its_successors_checkpoint(checkpoints):
    def successor() -> None:
        checkpoints.save([Engine("successor")], at(checkpoints, 4))

    checkpoints.save([Engine("first")], at(checkpoints, 2))
    # The successor is another process: it has another partial folder.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.getpid", lambda: 1)
        checkpoints.save([Engine("superseded", lambda: (patch.undo(), successor()))], at(checkpoints, 4))
    engine = Engine("")
    assert checkpoints.restore([engine]).step == 4
    assert engine.loaded == "successor"


def test_what_a_killed_trainer_left_unfinished_is_removed_and_not_restored(checkpoints, tmp_path):
    def killed() -> None:
        raise KeyboardInterrupt

    final = checkpoints.save([Engine("whole")], at(checkpoints, 2))
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save([Engine("half", killed)], at(checkpoints, 4))
    assert len(list(final.parent.iterdir())) == 2
    engine = Engine("")
    assert checkpoints.restore([engine]).step == 2
    assert engine.loaded == "whole"
    assert list(final.parent.iterdir()) == [final]
    shutil.rmtree(final)
    assert checkpoints.restore([engine]).step == 0


def opened(folder: Path, size: int = 1, **sections: Any) -> Checkpoints:
    return Checkpoints(make_settings(folder, folder, **sections), OneRank(size))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"run": {"name": "else", "dir": Path("DIR")}}, r"run\.name was test and is else"),
        ({"model": {"path": Path("/another")}}, r"model\.path was .* and is /another"),
        ({"model": {"path": Path("DIR"), "dtype": "bfloat16"}}, r"model\.dtype was float32 and is bfloat16"),
        ({"model": {"path": Path("DIR"), "lora_rank": 8}}, r"model\.lora_rank was 0 and is 8"),
        ({"data": {"train_batch_size": 8}}, r"data\.train_batch_size was 4 and is 8"),
        ({"deepspeed": {"zero_stage": 1}}, r"deepspeed\.zero_stage was 0 and is 1"),
        ({"algorithm": {"adv_estimator": "gae"}}, r"critic\.model\.path was not set and is "),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path: Path, changed: dict[str, dict[str, Any]], named: str) -> None:
    opened(tmp_path).save([Engine("")], at(opened(tmp_path), 1))
    sections = {n: {k: tmp_path if v == Path("DIR") else v for k, v in s.items()} for n, s in changed.items()}
    with pytest.raises(TrainingError, match=named):
        opened(tmp_path, **sections).restore([Engine("")])


def test_what_does_not_belong_to_the_run_may_change(tmp_path: Path) -> None:
    state = at(opened(tmp_path), 1)
    state.extra["updater"] = {"kl_coefficient": 0.25}
    opened(tmp_path).save([Engine("")], state)
    changed = {
        "actor": {"optim": {"lr": 1.0, "lr_scheduler_type": "cosine"}, "ppo_epochs": 2, "clip_ratio_high": 0.3},
        "algorithm": {"correction": "behaviour"},
        "trainer": {"total_training_steps": 99, "save_freq": 7, "logger": ["console"]},
    }
    engine = Engine("")
    restored = opened(tmp_path, size=3, **changed).restore([engine])
    assert restored.step == 1
    assert not engine.same_ranks
    assert restored.num_ranks == 3, "and the next checkpoint says so"
    assert restored.extra == {"updater": {"kl_coefficient": 0.25}}


def test_random_states_go_on_with_as_many_ranks_and_are_independent_with_others(tmp_path: Path) -> None:
    torch.manual_seed(5)
    opened(tmp_path).save([Engine("")], at(opened(tmp_path), 1))
    expected = torch.rand(3)
    opened(tmp_path).restore([Engine("")])
    assert torch.equal(torch.rand(3), expected)
    opened(tmp_path, size=2).restore([Engine("")])
    other = torch.rand(3)
    opened(tmp_path, size=2).restore([Engine("")])
    assert torch.equal(torch.rand(3), other)
    assert not torch.equal(other, expected)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 3, "step": 1}'])
def test_a_broken_state_is_one_sentence(tmp_path: Path, text: str) -> None:
    folder = opened(tmp_path).save([Engine("")], at(opened(tmp_path), 1))
    (folder / "state.json").write_text(text)
    with pytest.raises(TrainingError, match="is not a trainer's state: put that file back from a copy"):
        opened(tmp_path).restore([Engine("")])


def test_a_state_of_another_format_is_named(tmp_path: Path) -> None:
    folder = opened(tmp_path).save([Engine("")], at(opened(tmp_path), 1))
    (folder / "state.json").write_text('{"format": 1, "run": "test"}')
    with pytest.raises(TrainingError, match="has format 1, this trainer reads 3"):
        opened(tmp_path).restore([Engine("")])


def two_saved(folder: Path) -> list[Path]:
    return [opened(folder).save([Engine("w" * 500)], at(opened(folder), step)) for step in (1, 2)]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda f: flip(f / "weights"), "weights has another checksum from byte 0 on than when it was saved"),
        (lambda f: flip(f / "random-0.safetensors"), "random-0.safetensors has another checksum"),
        (lambda f: (f / "weights").write_text("half"), "weights has 4 bytes and had 500 when it was saved"),
        (lambda f: (f / "weights").unlink(), "weights is not there"),
        (lambda f: (f / "manifest.json").unlink(), "manifest.json is not there"),
        (lambda f: (f / "manifest.json").write_text("{"), "manifest.json can't be read"),
    ],
)
def test_a_damaged_file_is_named_before_anything_is_loaded(
    tmp_path: Path, damage: Callable[[Path], None], named: str
) -> None:
    first, second = two_saved(tmp_path)
    damage(second)
    engine = Engine("")
    with pytest.raises(TrainingError) as refused:
        opened(tmp_path).restore([engine])
    assert f"the checkpoint in {second} is damaged, {named}" in str(refused.value)
    assert f"or go back to step 1 with --trainer.resume_from_path={first} " in str(refused.value)
    assert not hasattr(engine, "loaded")


def test_the_flag_that_the_sentence_names_goes_back(tmp_path: Path) -> None:
    first, second = two_saved(tmp_path)
    flip(second / "weights")
    back = opened(tmp_path, trainer={"resume_from_path": first})
    assert back.restore([Engine("")]).step == 1
    back.put_newer_aside(1)
    aside = second.with_name("aside-0-step-000002")
    assert (aside / "weights").is_file()
    assert opened(tmp_path).restore([Engine("")]).step == 1, "and is the newest from then on"
    opened(tmp_path).save([Engine("again")], at(opened(tmp_path), 2))
    engine = Engine("")
    assert opened(tmp_path).restore([engine]).step == 2
    assert engine.loaded == "again"
    back.put_newer_aside(1)
    assert second.with_name("aside-1-step-000002").is_dir()


def test_the_only_checkpoint_damaged(tmp_path: Path) -> None:
    folder = opened(tmp_path).save([Engine("w")], at(opened(tmp_path), 1))
    flip(folder / "weights")
    with pytest.raises(TrainingError, match=r"from a copy, or begin anew with another run\.name and run\.dir"):
        opened(tmp_path).restore([Engine("")])


def test_a_path_without_a_checkpoint_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="holds no checkpoint: name a folder such as "):
        opened(tmp_path, trainer={"resume_from_path": tmp_path / "nothing"}).restore([Engine("")])


@pytest.mark.parametrize("as_file", [False, True])
def test_what_has_the_name_and_no_state_is_put_aside_and_never_taken_for_a_checkpoint(
    tmp_path: Path, as_file: bool, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = two_saved(tmp_path)
    if as_file:
        shutil.rmtree(second)
        second.write_text("mine")
    else:
        (second / "state.json").unlink()
    caplog.set_level("INFO", "april.trainer")
    checkpoints = opened(tmp_path)
    assert checkpoints.restore([Engine("")]).step == 1
    assert f"{second.name} in {second.parent} is no checkpoint" in caplog.text
    assert f"goes on from {first.name}" in caplog.text
    assert checkpoints.save([Engine("whole")], at(checkpoints, 2)) == second
    aside = second.with_name("aside-0-step-000002")
    assert aside.read_text() == "mine" if as_file else (aside / "weights").is_file()
    assert str(aside) in caplog.text
    engine = Engine("")
    assert opened(tmp_path).restore([engine]).step == 2
    assert engine.loaded == "whole"


def test_going_back_puts_unfinished_folders_aside_too(tmp_path: Path) -> None:
    first, second = two_saved(tmp_path)
    (second / "state.json").unlink()
    opened(tmp_path, trainer={"resume_from_path": first}).put_newer_aside(1)
    assert not second.exists()
    assert second.with_name("aside-0-step-000002").is_dir()


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    "place",
    ["trainer.checkpoint.save_file", "trainer.checkpoint.write_manifest", "pathlib.Path.write_text", "os.fsync",
     "pathlib.Path.replace", "pathlib.Path.mkdir"],
)  # fmt: skip
def test_a_full_disk_is_one_sentence_wherever_it_strikes(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    checkpoints.save([Engine("")], at(checkpoints, 1))
    with monkeypatch.context() as patch:
        patch.setattr(place, full_disk)
        with pytest.raises(TrainingError, match=r"step 2 can't be written to .*No space left .*: free space there, or"):
            checkpoints.save([Saving()], at(checkpoints, 2))
    assert checkpoints.restore([Engine("")]).step == 1


class Saving(Engine):
    """Writes by other means than those that the test breaks."""

    def __init__(self) -> None:
        super().__init__("")

    def save(self, folder: Path) -> None:
        with open(folder / "weights", "w") as file:
            file.write("w")
