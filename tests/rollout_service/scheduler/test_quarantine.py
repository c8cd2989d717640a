"""The quarantine finds who kills engines, and condemns nobody else."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_service.scheduler.quarantine import Quarantine

LIMIT = 3


class Engine:
    """Runs groups of one or more attempts; killers kill it whenever they run, with some probability."""

    def __init__(self, num_groups: int, slots: int, killers: dict[str, float], seed: int) -> None:
        self.quarantine = Quarantine(LIMIT)
        self.rng = random.Random(seed)
        self.killers = killers
        self.slots = slots
        self.waiting = {f"g{i}": self.rng.randint(1, 4) for i in range(num_groups)}  # attempts left
        self.finished: set[str] = set()
        self.condemned: set[str] = set()
        self.num_deaths = 0

    def turn(self) -> None:
        q = self.quarantine
        can_run = [q.alone] if q.alone else [g for g in self.waiting if g not in q.held]
        running = [g for g in can_run if g in self.waiting]
        self.rng.shuffle(running)
        running = running[: self.slots]
        assert running, "somebody can always run"
        if any(self.rng.random() < self.killers.get(g, 0) for g in running):
            self.num_deaths += 1
            q.died(running)
            for group in q.condemned - self.condemned:
                assert group in self.killers, "only killers are condemned"
            for group in set(q.condemned):
                self.condemned.add(group)
                self.waiting.pop(group)
                q.closed(group)
            return
        for group in running:
            q.survived(group)
            self.waiting[group] -= 1
            if self.waiting[group] == 0:
                del self.waiting[group]
                self.finished.add(group)
                q.closed(group)


@settings(max_examples=200, deadline=None)
@given(
    num_groups=st.integers(1, 40),
    slots=st.integers(1, 40),
    num_killers=st.integers(0, 3),
    share=st.sampled_from([1.0, 0.6]),
    seed=st.integers(0, 2**32),
)
def test_everybody_else_finishes_and_only_killers_are_condemned(num_groups, slots, num_killers, share, seed):
    killers = {f"g{i}": share for i in random.Random(seed).sample(range(num_groups), min(num_killers, num_groups))}
    engine = Engine(num_groups, slots, killers, seed)
    for _ in range(5000):
        if not engine.waiting:
            break
        engine.turn()
    assert not engine.waiting
    assert engine.finished | engine.condemned == {f"g{i}" for i in range(num_groups)}
    if share == 1.0:
        assert engine.condemned == set(killers)


@pytest.mark.parametrize("num_groups", [1, 2, 8, 64, 256])
def test_deaths_until_the_killer_is_found_grow_with_the_logarithm(num_groups):
    engine = Engine(num_groups, num_groups, {"g0": 1.0}, seed=1)
    while engine.waiting:
        engine.turn()
    assert engine.condemned == {"g0"}
    assert engine.num_deaths <= LIMIT + (num_groups - 1).bit_length() + 1


def test_a_first_death_holds_nobody():
    quarantine = Quarantine(LIMIT)
    quarantine.died(["a", "b", "c"])
    assert quarantine.alone is None
    assert not quarantine.held


def test_who_was_not_there_again_is_not_suspected():
    quarantine = Quarantine(LIMIT)
    quarantine.died(["a", "b"])
    quarantine.died(["b", "c", "d"])
    assert not quarantine.held
    quarantine.died(["b", "d"])
    assert quarantine.alone == "b"
