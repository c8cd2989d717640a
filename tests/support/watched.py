"""A service that only answers what people watch: statuses and pictures of a run that never was, over real HTTP."""

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from protocol.messages import AutotuneStatus, EngineStatus, Ledger, RoundStatus, Status
from protocol.states import SampleState
from protocol.watching import Limit, Quantiles, Tail, Verdict, Wait

NOW = 1_800_000_000.0
METRICS = {"reward/mean": 0.62, "lag/share_0": 0.2, "lag/share_3_4": 0.3, "lag/share_9_up": 0.5, "lag/mean": 1.25}


def engine(worker: str = "engine-0", **changed) -> EngineStatus:
    values = {"epoch": 1, "slots": 16, "running": 12, "version": 7, "alive": True, "tokens_generated": 1000}
    return EngineStatus(worker=worker, **(values | {"kv_use": 0.25, "num_preemptions": 0} | changed))


def status(**changed) -> Status:
    values = {
        "run": "demo",
        "service_epoch": 1,
        "pid": 1,
        "uptime_s": 3725.0,
        "paused": False,
        "draining": False,
        "waits": [],
        "active_version": 7,
        "newest_version": 8,
        "trainer_epoch": 1,
        "trainer_connected": True,
        "offered": 1,
        "leased_steps": [8, 9],
        "trained_step": 7,
        "durable_step": 6,
        "samples": {SampleState.RUNNING: 12, SampleState.PARKED: 5},
        "oldest_waiting_s": 12.0,
        "ledger": Ledger(admitted=30, open=5, ready=3, leased=8, consumed=13, dropped=1),
        "ledger_error": 0,
        "round": RoundStatus(round=9, started_s_ago=4.2, target_groups=8, num_ready=3, num_must_finish=2),
        "engines": [engine(), engine("engine-1", running=4)],
        "counters": {"dropped:stale": 1},
        "settings": {"ratio": 1.5, "samples_ratio": 1.0, "lookahead": 1, "max_lag": 4, "train_batch_size": 4},
        "trainer_metrics": METRICS,
        "num_train_prompts": 100,
        "redis_pid": None,
        "now": NOW,
        "autotune": AutotuneStatus(mode="shadow", ratio=2.0, reason="slots idle"),
        "verdict": Verdict(limit=Limit.TAIL, sentence="The tail limits the run: 38 % idle.", advice="Raise the ratio."),
        "waiting": [Wait(who="the trainer", waits_for="the batch of step 10", since=NOW - 3)],
    }
    return Status(**(values | changed))


def tail() -> Tail:
    quantiles = Quantiles(p50=31, p90=120.5, p99=173, largest=256)
    nothing = {
        name: [] for name in ("token_curve", "finish_curve", "trained_curve", "survival", "by_length", "stragglers")
    }
    return Tail(
        num_finished=1200, num_unfinished=5, tokens=quantiles, survival_tokens=quantiles, trained_tokens=40.0,
        finish_s=Quantiles(p50=1.5, p90=None, p99=None, largest=None), dispatched_tokens=61.0, **nothing,
    )  # fmt: skip


class FakeService(BaseHTTPRequestHandler):
    """Answers as the class attributes say; a stream of events ends after those it has."""

    status: Status = status()
    code = 200
    streams = 0

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        cls = type(self)
        if cls.code != 200:
            self._answer(json.dumps({"type": "x", "title": "x", "status": cls.code, "detail": "it starts"}), cls.code)
        elif self.path == "/v1/status":
            self._answer(cls.status.model_dump_json())
        elif self.path == "/v1/pictures/tail":
            self._answer(tail().model_dump_json())
        elif self.path == "/v1/events":
            cls.streams += 1
            self._answer(f"event: status\ndata: {cls.status.model_dump_json()}\n\n")
        else:
            self._answer("{}", 404)

    def _answer(self, text: str, code: int = 200) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def fake_service(port: int = 0) -> Generator[tuple[type[FakeService], str]]:
    handler = type("Handler", (FakeService,), {})
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield handler, f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
