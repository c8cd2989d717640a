"""Settings: precedence, unknown names, bounds and the rules that tie sections together."""

import re

import pytest

from protocol.errors import SettingsError
from protocol.settings import dump_settings, iter_fields, load_settings


@pytest.fixture
def run_toml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[run]\nname = "from-file"\n[rollout]\nratio = 1.5\nlookahead = 0\n[actor.optim]\nlr = 1e-5\n')
    return path


def test_command_line_beats_environment_beats_file(run_toml, monkeypatch):
    monkeypatch.setenv("APRIL_ROLLOUT__RATIO", "1.75")
    monkeypatch.setenv("APRIL_ROLLOUT__LOOKAHEAD", "2")
    settings = load_settings(run_toml, ["--rollout.lookahead=1"])
    assert settings.run.name == "from-file"
    assert settings.rollout.ratio == 1.75
    assert settings.rollout.lookahead == 1
    assert settings.actor.optim.lr == 1e-5
    assert settings.actor.optim.weight_decay == 0.01


def test_values_keep_their_types(run_toml):
    words = ['--data.train_files=["a.jsonl", "b.parquet"]', "--run.name=x1", "--trainer.val_before_train=true"]
    settings = load_settings(run_toml, words)
    assert [p.name for p in settings.data.train_files] == ["a.jsonl", "b.parquet"]
    assert settings.trainer.val_before_train is True


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("--rollout.ratoi=2", "unknown setting rollout.ratoi; did you mean rollout.ratio?"),
        ("--actor.optim.lrr=1", "did you mean actor.optim.lr?"),
        ("--rolout.ratio=2", "did you mean rollout.ratio?"),
        ("--rollout.ratio=0.9", "rollout.ratio: Input should be greater than or equal to 1"),
        ("--rollout.n=1", "rollout.n must be at least 2"),
        ("--rollout.max_lag=0", "needs rollout.max_lag >= 1"),
        ("--rollout.top_p=0.9", "rollout.allow_truncated_sampling = true"),
        ("--rollout.top_k=5", "rollout.allow_truncated_sampling = true"),
        ("--rollout.min_p=0.1", "rollout.allow_truncated_sampling = true"),
        ("--rollout.on_install=keep", "engine.enable_prefix_caching = false"),
        ("--rollout.min_group_samples=9", "larger than rollout.n"),
        ("--actor.ppo_mini_batch_size=7", "must divide data.train_batch_size"),
        ("--service.host=0.0.0.0", "set a token"),
        ("--engine.max_model_len=10", "less than data.max_prompt_length + data.max_response_length"),
        ("--run.name=../x", "run.name"),
        ("rollout.ratio=2", "write --section.field=value"),
        ("--ratio=2", "write --section.field=value"),
        ("--rollout.ratio.x=2", "rollout.ratio: Input should be a valid number"),
    ],
)
def test_bad_settings_get_one_sentence(run_toml, word, sentence):
    with pytest.raises(SettingsError) as caught:
        load_settings(run_toml, [word])
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_name_in_the_environment(run_toml, monkeypatch):
    monkeypatch.setenv("APRIL_ROLLOUT__RATOI", "2")
    with pytest.raises(SettingsError, match=r"did you mean rollout\.ratio"):
        load_settings(run_toml)


@pytest.mark.parametrize("text", ["[run\n", "ratio = ", b"\xff\xfe"])
def test_broken_file(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SettingsError, match="can't be read as TOML"):
        load_settings(path)


def test_missing_file(tmp_path):
    with pytest.raises(SettingsError, match="does not exist"):
        load_settings(tmp_path / "no.toml")


def test_secrets_are_not_shown(run_toml):
    words = ["--service.token=s3cret", "--buffer.password=pa55", "--trainer.token=t0ken"]
    shown = str(dump_settings(load_settings(run_toml, words)))
    assert not any(secret in shown for secret in ("s3cret", "pa55", "t0ken"))


def test_correction_is_never_off_by_default(run_toml):
    assert load_settings(run_toml).algorithm.correction == "decoupled"


def test_every_setting_has_help():
    missing = [setting.name for setting in iter_fields() if not setting.help]
    assert not missing


@pytest.mark.parametrize(
    "word",
    ["actor.optim.lr=true", "trainer.save_freq=true", "actor.entropy_coeff=false", "rollout.n=true",
     "actor.optim.betas=[true,0.9]", "rollout.stop_token_ids=[true]", 'data.source_weights={"a":true}',
     "engine.max_model_len=false", "algorithm.correction_band=[0.5,true]", "algorithm.kl_ctrl.horizon=true"],
)  # fmt: skip
def test_a_truth_value_is_no_number(tmp_path, word):
    key, _, value = word.partition("=")
    with pytest.raises(SettingsError, match=rf"{re.escape(key)}: must be a number, and true or false is none"):
        load_settings(None, [f"--{word}"])
    section, _, name = key.rpartition(".")
    (tmp_path / "run.toml").write_text(f"[{section}]\n{name} = {value.replace(':', '=')}\n")
    with pytest.raises(SettingsError, match=re.escape(key)):
        load_settings(tmp_path / "run.toml")


def test_truth_values_where_they_belong(monkeypatch):
    monkeypatch.setenv("APRIL_SERVICE__PORT", "8041")
    settings = load_settings(None, ["--service.dashboard=false", '--reward.settings={"a":true}'])
    assert not settings.service.dashboard
    assert settings.reward.settings == {"a": True}
    assert settings.service.port == 8041, "the environment has text"


@pytest.mark.parametrize(
    "url",
    ["", "/x", "localhost:8040", "ftp://x", "http://", "http://[::1", "http://h:99999", "http://h:0", "http://a b",
     "http://h?x=1", "http://h#x"],
)  # fmt: skip
def test_an_address_that_is_none_is_refused_when_it_is_read(url):
    with pytest.raises(SettingsError, match=r"trainer\.service_url: .* must be a whole http\(s\) address"):
        load_settings(None, [f"--trainer.service_url={url}"])


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/", "https://u:secret@h/april", "http://[::1]:8040"])
def test_an_address_is_taken(url):
    assert load_settings(None, [f"--trainer.service_url={url}"]).trainer.service_url == url


def test_a_refused_address_shows_no_secret():
    with pytest.raises(SettingsError) as refused:
        load_settings(None, ["--trainer.service_url=ftp://me:hunter2@h"])
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("seed", [2**63, 10**30])
def test_a_seed_beyond_what_generators_take_is_refused(seed):
    with pytest.raises(SettingsError, match=r"run\.seed: .* less than or equal to"):
        load_settings(None, [f"--run.seed={seed}"])
