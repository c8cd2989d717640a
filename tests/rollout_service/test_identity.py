"""A run folder is not continued with another model."""

import pytest

from protocol.errors import SettingsError
from rollout_service.identity import check_identity, claim_folder
from tests.support.service import service_settings


def test_the_same_run_goes_on_and_other_settings_may_change(tmp_path):
    claim_folder(service_settings(tmp_path))
    check_identity(service_settings(tmp_path, rollout={"ratio": 1.5, "n": 4}))


def test_a_service_that_never_started_leaves_the_folder_to_the_next(tmp_path):
    check_identity(service_settings(tmp_path, model={"path": "/wrong"}))
    check_identity(service_settings(tmp_path))


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"model": {"path": "/other"}}, "model.path"), ({"rollout": {"temperature": 0.5}}, "rollout.temperature")],
)
def test_another_model_or_temperature_is_refused(tmp_path, changes, name):
    claim_folder(service_settings(tmp_path))
    with pytest.raises(SettingsError, match=name):
        check_identity(service_settings(tmp_path, **changes))


def test_a_damaged_file_is_refused(tmp_path):
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(SettingsError, match="can't be read"):
        check_identity(service_settings(tmp_path))
