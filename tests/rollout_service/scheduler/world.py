"""A tiny world around the scheduler: it carries out decisions at once and counts what must hold."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from rollout_service.scheduler.admission import Outlook
from rollout_service.scheduler.decisions import (
    Admit,
    BeginRound,
    Decision,
    Install,
    Observation,
    OfferBatch,
    Park,
    RoundLimits,
    Start,
)
from rollout_service.scheduler.rounds import RoundScheduler

MAX_EVENTS = 20_000  # a run that is not stuck needs a few hundred


@dataclass
class FakeSample:
    sample_id: str
    index: int
    length: int
    tokens: list[int] = field(default_factory=list)  # version of each
    running: bool = False
    done: bool = False


@dataclass
class FakeGroup:
    group_id: str
    seq: int
    samples: list[FakeSample]
    ready_seq: int | None = None

    @property
    def oldest(self) -> int:
        return min((v for s in self.samples for v in s.tokens), default=10**9)


class World:
    """Time goes in ticks: each running sample gets one token a tick."""

    def __init__(self, limits: RoundLimits, slots: int, seed: int = 0, save_freq: int = 1) -> None:
        self.rng = random.Random(seed)
        self.limits = limits
        self.scheduler = RoundScheduler(limits)
        self.groups: dict[str, FakeGroup] = {}
        self.batches: list[list[FakeGroup]] = []  # offered, not leased
        self.leased: list[tuple[int, int, list[FakeGroup]]] = []
        self.trained: list[tuple[int, list[FakeGroup]]] = []  # (version at training, groups)
        self.seen = Observation(0.0, slots, 0, 0, 0, 0, 0, 0, 0, 0)
        self.log: list[Decision] = []
        self.seq = 0
        self.ready_seq = 0
        self.dropped = 0
        self.fail_install = False
        self.predict: Callable[[int], Outlook] = lambda seq: Outlook(longest=seq * 7 % 13, context=seq * 5 % 11)

    def see(self, **changes: object) -> None:
        self.seen = replace(self.seen, **changes)

    def sample(self, sample_id: str) -> FakeSample:
        group_id, index = sample_id.split(".")
        return self.groups[group_id].samples[int(index)]

    def remaining(self, sample_id: str) -> float:
        """A forecast that is sometimes wrong."""
        sample = self.sample(sample_id)
        return max(1, sample.length + self.seq % 5 - 2 - len(sample.tokens))

    def upcoming(self, count: int) -> list[float]:
        return [self.predict(self.seq + k).longest for k in range(1, count + 1)]

    def act(self) -> None:
        """Decide and carry out until nothing is decided."""
        while decisions := self.scheduler.decide(self.seen):
            for decision in decisions:
                self.log.append(decision)
                self._carry_out(decision)

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Admit(count):
                for _ in range(count):
                    self.seq += 1
                    lengths = [max(1, int(self.rng.lognormvariate(2, 1))) for _ in range(self.limits.group_samples)]
                    samples = [FakeSample(f"g{self.seq}.{i}", i, n) for i, n in enumerate(lengths)]
                    self.groups[f"g{self.seq}"] = FakeGroup(f"g{self.seq}", self.seq, samples)
                    self.scheduler.admitted(
                        f"g{self.seq}", self.seq, [(s.sample_id, s.index) for s in samples], self.predict(self.seq)
                    )
            case Start(sample_ids):
                for sample_id in sample_ids:
                    sample = self.sample(sample_id)
                    assert not sample.running
                    assert not sample.done
                    sample.running = True
                running = sum(s.running for g in self.groups.values() for s in g.samples)
                assert running <= self.seen.slots
            case Park(sample_ids, _):
                for sample_id in sample_ids:
                    self.sample(sample_id).running = False
                    self.scheduler.parked(sample_id)
            case Install(version, _):
                if not self.fail_install:
                    self.see(active_version=version)
                self.see(pending_version=None)
                self.scheduler.installed()
            case OfferBatch(_):
                ready = sorted((g for g in self.groups.values() if g.ready_seq), key=lambda g: (g.oldest, g.ready_seq))
                batch = ready[: self.limits.batch_groups]
                assert len(batch) == self.limits.batch_groups
                for group in batch:
                    del self.groups[group.group_id]
                self.batches.append(batch)
                self.see(offered=self.seen.offered + 1)
                self.scheduler.offered()
            case BeginRound():
                pass

    def tick(self) -> None:
        """One token for each running sample."""
        self.see(now_s=self.seen.now_s + 1)
        for group in list(self.groups.values()):
            for sample in group.samples:
                if sample.running:
                    self._grow(group, sample)
        self.act()

    def _grow(self, group: FakeGroup, sample: FakeSample) -> None:
        sample.tokens.append(self.seen.active_version)
        if len(sample.tokens) < sample.length:
            return
        sample.running, sample.done = False, True
        self.scheduler.ended(sample.sample_id)
        if all(s.done for s in group.samples):
            self.ready_seq += 1
            group.ready_seq = self.ready_seq
            self.scheduler.closed(group.group_id, ready=True)
            self.see(ready=self.seen.ready + 1)

    def drop(self, group_id: str) -> None:
        """A filter drops a group in flight."""
        del self.groups[group_id]
        self.dropped += 1
        self.scheduler.closed(group_id, ready=False)
        self.act()

    def lease(self) -> bool:
        if not self.batches:
            return False
        step = self.seen.last_leased_step + 1
        self.leased.append((step, self.seen.version_at(step), self.batches.pop(0)))
        self.see(
            last_leased_step=step,
            offered=self.seen.offered - 1,
            leased_untrained=self.seen.leased_untrained + 1,
            ready=self.seen.ready - self.limits.batch_groups,
        )
        self.act()
        return True

    def train(self) -> None:
        """Train the oldest leased batch and publish."""
        step, version, groups = self.leased.pop(0)
        assert version == self.seen.newest_version, "the trainer holds the newest version when the step starts"
        self.trained.append((version, groups))
        self.see(
            leased_untrained=self.seen.leased_untrained - 1,
            trained_step=step,
            newest_version=self.seen.newest_version + 1,
            newest_step=step,
            pending_version=self.seen.newest_version + 1,
        )
        self.act()

    def live(self, draw: Callable[[st.SearchStrategy[str]], str], num_trained: int) -> None:
        """Events as they are drawn, until so many batches are trained. Whoever waits for a trainer gets one."""
        events = st.sampled_from(["tick"] * 6 + ["lease", "train", "pause", "drop", "fail"])
        for _ in range(MAX_EVENTS):
            if len(self.trained) >= num_trained:
                return
            match draw(events):
                case "lease":
                    self.lease()
                case "train" if self.leased:
                    self.fail_install = False
                    self.train()
                case "pause":
                    for allowed in (False, True):
                        self.see(generation_allowed=allowed)
                        self.act()
                case "drop" if self.dropped < 20 and (going := [g for g in self.groups.values() if not g.ready_seq]):
                    self.drop(going[0].group_id)
                case "fail":
                    self.fail_install = True
                case _:
                    self.tick()
                    if not self.any_runs() and not self.lease():
                        self.train() if self.leased else self.publish_again()
        raise AssertionError(f"stuck: {self.scheduler.waits}")

    def publish_again(self) -> None:
        """What a trainer does whose weights were not installed."""
        self.fail_install = False
        if self.seen.active_version < self.seen.newest_version:
            self.see(pending_version=self.seen.newest_version)
            self.act()

    def any_runs(self) -> bool:
        return any(s.running for g in self.groups.values() for s in g.samples)
