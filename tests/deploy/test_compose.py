"""The Compose file: what can be said of it without a Docker engine."""

import json
import re
from pathlib import Path

import pytest
import yaml

from deploy.compose.policy import LINK_NAME
from protocol.settings import load_settings

FOLDER = Path(__file__).parents[2] / "deploy" / "compose"
SECRETS = {"APRIL_SERVICE__TOKEN": "t0ken", "REDIS_PASSWORD": "pass", "GRAFANA_PASSWORD": "word"}
VARIABLE = re.compile(r"\$\{(\w+)(?::[?-]([^}]*))?\}")


def filled_in(text: str) -> str:
    """`${NAME:?…}` and `${NAME:-default}`, as Compose fills them in."""
    return VARIABLE.sub(lambda found: SECRETS.get(found[1], found[2] or ""), text)


@pytest.fixture(scope="module")
def compose() -> dict:
    return yaml.safe_load(filled_in((FOLDER / "docker-compose.yml").read_text()))


def test_it_follows_the_compose_specification(compose):
    checker = pytest.importorskip("check_jsonschema", reason="check-jsonschema brings the specification's schema")
    jsonschema = pytest.importorskip("jsonschema")
    folder = Path(checker.__file__).parent / "builtin_schemas" / "vendor"
    jsonschema.validate(compose, json.loads((folder / "compose-spec.json").read_text()))


def test_no_secret_has_a_default_and_every_one_is_in_the_example():
    text = (FOLDER / "docker-compose.yml").read_text()
    example = (FOLDER / "env.example").read_text()
    for name in SECRETS:
        assert f"{name}=\n" in example
        assert not re.search(rf"\$\{{{name}:-", text)
        assert re.search(rf"\$\{{{name}:\?", text)


def test_ports_are_on_loopback_and_redis_has_none(compose):
    ports = {name: service.get("ports", []) for name, service in compose["services"].items()}
    assert all(port.startswith("127.0.0.1:") for listed in ports.values() for port in listed)
    assert ports["redis"] == ports["trainer"] == []


def test_images_come_from_the_hub_with_a_version(compose):
    for service in compose["services"].values():
        name, _, tag = service["image"].partition(":")
        assert tag
        assert tag != "latest"
        assert "." not in name.partition("/")[0], "a registry's host"


def test_whatever_runs_on_has_a_health_check_and_what_is_waited_for_exists(compose):
    services = compose["services"]
    for name, service in services.items():
        assert ("healthcheck" in service) == (name != "policy"), name
        for other, wait in service.get("depends_on", {}).items():
            assert ("healthcheck" in services[other]) == (wait["condition"] == "service_healthy")


def test_mounted_files_exist_and_named_volumes_are_declared(compose):
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (FOLDER / source).exists(), source
            else:
                assert source in compose["volumes"]
        for secret in service.get("secrets", []):
            assert secret in compose["secrets"]


def test_its_settings_load_and_service_and_trainer_find_each_other(compose, monkeypatch):
    service, trainer = compose["services"]["service"], compose["services"]["trainer"]
    assert service["environment"] == trainer["environment"]
    for name, value in service["environment"].items():
        monkeypatch.setenv(name, str(value))
    settings = load_settings(FOLDER / ".." / "demo" / "demo.toml", [])
    assert settings.trainer.service_url == f"http://service:{settings.service.port}"
    assert service["ports"] == [f"127.0.0.1:{settings.service.port}:{settings.service.port}"]
    assert settings.service.token.get_secret_value() == SECRETS["APRIL_SERVICE__TOKEN"]
    assert str(settings.model.path) == f"/data/{LINK_NAME}"
    assert str(settings.run_dir).startswith("/data/")
    assert service["volumes"] == trainer["volumes"]


def test_prometheus_scrapes_what_the_file_starts_with_its_token(compose):
    jobs = {j["job_name"]: j for j in yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]}
    environment = compose["services"]["service"]["environment"]
    port = environment["APRIL_TRAINER__METRICS_PORT"]
    assert jobs["april-service"]["static_configs"][0]["targets"] == ["service:8040"]
    assert jobs["april-trainer"]["static_configs"][0]["targets"] == [f"trainer:{port}"]
    secret = jobs["april-service"]["authorization"]["credentials_file"]
    assert secret == f"/run/secrets/{compose['services']['prometheus']['secrets'][0]}"
    local = {
        j["job_name"] for j in yaml.safe_load((FOLDER / "../prometheus/prometheus.yml").read_text())["scrape_configs"]
    }
    assert local == set(jobs)


def test_the_image_holds_what_it_needs():
    copied = re.findall(r"^COPY (\S+)", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    kept = {line[1:] for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    root = FOLDER.parents[1]
    for name in copied:
        assert (root / name).exists(), name
        assert name in kept, name
