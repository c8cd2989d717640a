"""A service on the simulated engine behind a real HTTP server, until standard input closes; prints its port."""

import asyncio
import resource
import socket
import sys
from pathlib import Path

import uvicorn

from rollout_service.app.build import build_app
from tests.support.service import running_service, service_settings


async def main(folder: Path) -> None:
    """Serve; a trainer that takes no time keeps the rounds going."""
    settings = service_settings(
        folder, engine={"simulated": {"median_tokens": 12, "step_base_s": 0.01, "step_per_sequence_s": 0.0}}
    )
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    async with running_service(settings) as service:
        config = uvicorn.Config(
            build_app(service.host), log_level="warning", lifespan="off", timeout_graceful_shutdown=5
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        training = asyncio.create_task(train(service))
        print(listener.getsockname()[1], flush=True)
        await asyncio.to_thread(sys.stdin.read)
        training.cancel()
        service.host.stopping()
        server.should_exit = True
        await serving
    print("ended in order", flush=True)


async def train(service) -> None:
    headers = await service.open_trainer()
    step = 0
    while True:
        step += 1
        await service.batch(step, headers)
        await service.publish(step, headers)


if __name__ == "__main__":
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(main(Path(sys.argv[1])))
