"""A real service with weights, killed again and again: what it admits is what an undisturbed one would."""

import contextlib
import json
import signal
import socket
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from deploy.processes import start_april
from protocol.batch import MEDIA_TYPE, decode_batch
from protocol.messages import TRAINER_EPOCH_HEADER
from protocol.settings import load_settings
from rollout_service.prompts.interface import START_CURSOR
from rollout_service.prompts.load import load_prompts
from rollout_service.prompts.order import build_order

ROOT = Path(__file__).parents[3]
NUM_LIVES, STEPS_A_LIFE, BATCH_GROUPS = 3, 4, 4

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOML = """
[run]
name = "mixture"
dir = "{folder}/run"
[model]
tokenizer_path = "{tokenizer}"
[data]
train_files = "{folder}/train.jsonl"
val_files = "{folder}/train.jsonl"
apply_chat_template = false
train_batch_size = 4
max_prompt_length = 16
max_response_length = 64
source_weights = {{ common = 3, rare = 1 }}
[reward]
name = "exact_match"
[rollout]
n = 2
stop_token_ids = [0]
[engine]
backend = "simulated"
max_num_seqs = 16
simulated = {{ median_tokens = 20, step_base_s = 0.002, step_per_sequence_s = 0.0 }}
[evaluation]
max_concurrency = 1
[service]
port = {port}
"""


@pytest.fixture
def run_toml(tmp_path, tiny_model_dir):
    rows = [(source, i) for source, size in (("common", 20), ("rare", 3)) for i in range(size)]
    lines = [json.dumps({"prompt": f"{s}{i}", "ground_truth": i, "data_source": s}) for s, i in rows]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = tmp_path / "run.toml"
    path.write_text(TOML.format(folder=tmp_path, tokenizer=tiny_model_dir, port=port))
    return path


def wait_ready(client, child):
    while True:
        child.check_alive()
        with contextlib.suppress(httpx.TransportError):
            if client.get("/v1/status").is_success:
                return
        time.sleep(0.05)


def train(client, first):
    """Consume the next steps; prompt ids by the number of their group."""
    epoch = client.post("/v1/trainers", json={"durable_step": first - 1}).raise_for_status().json()["trainer_epoch"]
    headers = {TRAINER_EPOCH_HEADER: str(epoch), "Accept": MEDIA_TYPE}
    found = {}
    for step in range(first, first + STEPS_A_LIFE):
        response = client.post("/v1/batches", json={"step": step, "wait_s": 60}, headers=headers)
        assert response.status_code == 200, response.text
        groups = decode_batch(response.content).header.groups
        found |= {int(group.group_id.removeprefix("g")): group.prompt_id for group in groups}
        client.post(f"/v1/trainers/steps/{step}", headers=headers).raise_for_status()
        client.post(f"/v1/batches/{step}/ack", headers=headers).raise_for_status()
    return found


def test_kills_neither_skip_nor_repeat_and_lose_only_evaluations(run_toml, tmp_path):
    settings = load_settings(run_toml)
    served, lost = {}, []
    with httpx.Client(base_url=f"http://127.0.0.1:{settings.service.port}", timeout=90) as client:
        for life in range(NUM_LIVES):
            log = tmp_path / f"serve-{life}.log"
            with start_april("serve", ["serve", str(run_toml)], log, {"PYTHONPATH": str(ROOT)}) as child:
                wait_ready(client, child)
                assert [client.get(f"/v1/evaluations/{name}").status_code for name in lost] == [404] * len(lost)
                served |= train(client, 1 + life * STEPS_A_LIFE)
                lost.append(client.post("/v1/evaluations", json={}).raise_for_status().json()["id"])
                status = client.get("/v1/status").json()
                if life < NUM_LIVES - 1:  # the last one ends in order, and its Redis with it
                    child.process.send_signal(signal.SIGKILL)
                    child.process.wait()
    num_steps = NUM_LIVES * STEPS_A_LIFE
    assert len(served) == num_steps * BATCH_GROUPS, "a group was delivered twice"
    assert status["ledger_error"] == 0
    whole, _ = build_order(load_prompts(settings).train, settings).take(START_CURSOR, max(served) + 1)
    assert served == {number: whole[number].prompt_id for number in served}
    counts = Counter(name.split(":")[0] for name in served.values())
    assert counts["rare"] == pytest.approx(len(served) / 4, abs=6)
