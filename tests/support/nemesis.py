"""What breaks a system at random: kills, stops, cuts, a second trainer, a crash at a named place.

Always true: a fault undoes itself (what was stopped goes on, the network is whole again), what it killed is left to the
supervisor; each is written to the history once it is over, and counted if it struck something that lived. The choice is
a function of the seed; what comes of it is not, since the processes run in real time.
"""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import redis

from protocol.failpoints import Failpoint
from tests.support.children import ENGINES, REWARD_WORKERS, children_of
from tests.support.cluster import Process, System
from tests.support.tcp_proxy import Mode

TRAINER_PLACES = ("after_lease", "mid_step", "after_optimizer_step", "after_checkpoint", "after_ack")
SERVICE_PLACES = ("mid_cut", "mid_park", "mid_install", "mid_offer", "after_spool")
assert {*TRAINER_PLACES, *SERVICE_PLACES} == set(Failpoint), "every place is somebody's"

LONGEST_STOP_S = 2.0
START_PATIENCE_S = 60.0  # a service starts in seconds, on a busy machine in many
LONGEST_CUT_S = 1.5
LONGEST_DELAY_S = 0.1  # of one piece: a transition takes two of them
RECOVERY_SHARE = 0.6
ARM_SHARE = 0.3  # of starts that are given a failpoint, so that most lives are long


class Nemesis:
    """Chooses and does faults, all or `only` those named; `arm` is for the supervisor."""

    def __init__(self, system: System, seed: int, only: Collection[str] = ()) -> None:
        self.done: Counter[str] = Counter()
        self.armed = True
        self._system = system
        self._random = random.Random(seed)
        self._arming = random.Random(seed + 1)
        self._deck: list[str] = []
        self._faults: dict[str, Callable[[], bool]] = {
            "service killed": lambda: self._kill(self._system.service),
            "service superseded": self._supersede_service,
            "service stopped": lambda: self._pause(self._system.service),
            "service ended": self._end_service,
            "engine killed": lambda: self._signal_child(ENGINES, signal.SIGKILL),
            "engine stopped": self._stop_engine,
            "reward worker killed": lambda: self._signal_child(REWARD_WORKERS, signal.SIGKILL),
            "trainer killed": lambda: self._kill(self._trainer()),
            "trainer stopped": lambda: self._pause(self._trainer()),
            "second trainer": self._second_trainer,
            "trainer stopped and superseded": self._supersede_stopped,
            "redis killed": lambda: self._kill(self._system.redis),
            "redis stopped": lambda: self._pause(self._system.redis),
            "redis away": self._redis_away,
            "redis full": self._fill_redis,
            "network cut": lambda: self._network(Mode.CUT, LONGEST_CUT_S),
            "network delayed": lambda: self._network(Mode.DELAY, LONGEST_STOP_S),
            "network half open": lambda: self._network(Mode.HALF_OPEN, LONGEST_CUT_S),
            "network mute": lambda: self._network(Mode.MUTE, LONGEST_CUT_S),
        }
        if only:
            self._faults = {name: self._faults[name] for name in only}

    @property
    def num_done(self) -> int:
        """Faults that are over, those at named places not counted."""
        return self.done.total()

    def strike(self) -> None:
        """One fault; each has been before any comes again."""
        if not self._deck:
            self._deck = self._random.sample(list(self._faults), len(self._faults))
        name = self._deck.pop()
        began_at = time.monotonic()
        struck = self._faults[name]()
        self.done[name] += struck
        self._system.journal.write("fault", name=name, began_at=began_at, struck=struck)

    def pause_s(self) -> float:
        """Time until the next fault: often soon, so that faults meet."""
        return self._random.expovariate(1.0)

    def lets_recover(self) -> bool:
        """Whether the next fault waits until the system trains again, so that it is hit in all that it does."""
        return self._random.random() < RECOVERY_SHARE

    def arm(self, process: str) -> str:
        """The failpoint that a process is started with, mostly none."""
        if not self.armed or self._arming.random() > ARM_SHARE:
            return ""
        place = self._arming.choice(TRAINER_PLACES if process == "trainer" else SERVICE_PLACES)
        action = self._arming.choice(("kill", "kill", "exit"))
        return f"{place}={action}@{self._arming.randint(1, 4)}"

    def _trainer(self) -> Process | None:
        return self._system.trainers[-1] if self._system.trainers else None

    def _kill(self, process: Process | None) -> bool:
        if process is None or not process.alive:
            return False
        self._system.kill(process)
        return True

    def _end_service(self) -> bool:
        """SIGTERM: everything is parked first, nothing is lost."""
        service = self._system.service
        if service is None or not service.alive or self._service_epoch() is None:
            return False
        service.popen.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            service.popen.wait(START_PATIENCE_S)
        return True

    def _signal_child(self, words: Sequence[str], number: signal.Signals) -> bool:
        """To one process that the service started for itself."""
        pids = children_of(self._system.service, words)
        if not pids:
            return False
        os.kill(self._random.choice(pids), number)
        return True

    def _stop_engine(self) -> bool:
        pids = children_of(self._system.service, ENGINES)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        self._wait(LONGEST_STOP_S)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it may have died with its service
                os.kill(pid, signal.SIGCONT)
        return bool(pids)

    def _pause(self, process: Process | None) -> bool:
        if process is None or not process.alive:
            return False
        process.stop()
        self._wait(LONGEST_STOP_S)
        process.go_on()
        return True

    def _second_trainer(self) -> bool:
        first = self._trainer()
        self._system.start_trainer()
        self._wait(LONGEST_STOP_S)
        return first is not None

    def _supersede_stopped(self) -> bool:
        """The old one sleeps in the middle of something, and wakes when the new one has long begun."""
        old = self._trainer()
        if old is None or not old.alive:
            return False
        old.stop()
        self._system.start_trainer()
        self._wait(2 * LONGEST_STOP_S)
        old.go_on()
        return True

    def _supersede_service(self) -> bool:
        """The old one sleeps until the new one owns the run; when it wakes it must end, and change nothing."""
        old, epoch = self._system.service, self._service_epoch()
        if old is None or epoch is None:
            return False
        old.stop()
        new = self._system.start_service()
        deadline = time.monotonic() + START_PATIENCE_S
        while new.alive and (self._service_epoch() or epoch) <= epoch and time.monotonic() < deadline:
            time.sleep(0.1)
        owns = (self._service_epoch() or epoch) > epoch
        old.go_on()
        if not owns:
            self._system.kill(old)  # nobody took its place
            return False
        try:
            code = old.popen.wait(START_PATIENCE_S)
        except subprocess.TimeoutExpired:
            code = 0
        self._system.journal.write("superseded_service", code=code)
        self._system.kill(old)
        return True

    def _service_epoch(self) -> int | None:
        status = self._system.status()
        return status.service_epoch if status else None

    def _redis_away(self) -> bool:
        struck = self._kill(self._system.redis)
        self._wait(LONGEST_STOP_S)
        return struck

    def _fill_redis(self) -> bool:
        """No memory for anything that grows, for a while."""
        try:
            with redis.Redis(port=self._system.redis_port, socket_timeout=START_PATIENCE_S) as client:
                client.config_set("maxmemory", client.info("memory")["used_memory"])
                self._wait(LONGEST_STOP_S)
                client.config_set("maxmemory", 0)
        except redis.ConnectionError:
            return False  # it had just died at another fault
        return True

    def _network(self, mode: Mode, longest_s: float) -> bool:
        self._system.proxy.set(mode, self._random.uniform(0.0, LONGEST_DELAY_S))
        self._wait(longest_s)
        self._system.proxy.set(Mode.PASS)
        return True

    def _wait(self, longest_s: float) -> None:
        time.sleep(self._random.uniform(0.1, longest_s))
