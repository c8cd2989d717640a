"""A service on the simulated engine with a trainer that takes no time, behind a real HTTP server; prints its port.

Arguments: a folder, and JSON with `port`, `sections` of settings, `evil` prompts, `trains`, `tokens` of each response.
It ends when its standard input closes.
"""

import asyncio
import contextlib
import json
import math
import socket
import sys
from pathlib import Path

import uvicorn

from rollout_service.app.build import build_app
from tests.support.service import TestService, running_service, service_settings

SECTIONS = {
    "rollout": {"lookahead": 0, "max_lag": 4},
    "engine": {"simulated": {"median_tokens": 16, "step_base_s": 0.02, "step_per_sequence_s": 0.0}},
    "data": {"max_prompt_length": 8, "max_response_length": 64},
}
EVIL = "</pre><script>document.title='run'</script><img src=x onerror=\"document.title='run'\">&lt;\0\x1b[31m\u202e"


async def main(folder: Path, options: dict) -> None:
    """Serve until standard input closes."""
    sections = dict(SECTIONS)
    for name, values in options.get("sections", {}).items():
        sections[name] = sections.get(name, {}) | values
    text = (lambda i: f"{EVIL} {i}") if options.get("evil") else "prompt {}".format
    tokens = options.get("tokens")
    listener = socket.create_server(("127.0.0.1", options.get("port", 0)))
    lengths = (lambda _: tokens) if tokens else None
    async with running_service(service_settings(folder, **sections), lengths=lengths, text=text) as service:
        config = uvicorn.Config(
            build_app(service.host), log_level="warning", lifespan="off", timeout_graceful_shutdown=2
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        training = asyncio.create_task(train(service)) if options.get("trains", True) else None
        print(listener.getsockname()[1], flush=True)
        await asyncio.to_thread(sys.stdin.read)
        if training:
            training.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await training
        service.host.stopping()
        server.should_exit = True
        await serving


async def train(service: TestService) -> None:
    """Take batch after batch, report metrics by the trainer's names, publish."""
    headers = await service.open_trainer()
    step = 1
    while True:
        body = {"step": step, "wait_s": 5}
        answer = await service.client.post("/v1/batches", json=body, headers=headers)
        if answer.status_code == 204:
            continue
        await service.client.post("/v1/trainers/metrics", json={"step": step, "metrics": report(step)}, headers=headers)
        await service.publish(step, headers)
        step += 1


def report(step: int) -> dict[str, float]:
    """Metrics of a step."""
    learned = 1 - math.exp(-step / 12)
    return {
        "reward/mean": 0.4 + 0.3 * learned,
        "reward/rewarded_and_stopped": 0.38 + 0.3 * learned,
        "response/length_mean": 16.0 + step % 5,
        "response/length_p99": 60.0,
        "response/stopped_share": 0.97,
        "response/truncated_share": 0.03,
        "lag/share_0": 0.6,
        "lag/share_1": 0.4,
        "importance/ess": 0.95,
        "importance/clipped_share": 0.01,
        "off_policy/kl_behaviour_proximal": 0.002,
        "mismatch_by_lag/mean_1": 0.03,
        "timing_s/step": 0.1,
        "timing_s/wait": 0.5,
        **({"eval/reward": 0.5 + 0.2 * learned, "eval/length_mean": 16.0} if step % 3 == 0 else {}),
    }


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
