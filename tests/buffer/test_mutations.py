"""Tests of the tests: without its guard in the Lua text, the test that watches the guard fails."""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from redis.exceptions import ResponseError

from buffer import scripts
from buffer.embedded import EmbeddedRedis
from buffer.interface import Limits
from protocol.errors import AprilError
from tests.buffer import (
    test_delivery,
    test_generation,
    test_groups,
    test_limits,
    test_patience,
    test_pool,
    test_services,
)
from tests.buffer.helpers import Rig, plain, redis_rig

Guard = Callable[[Any, Rig], Awaitable[None]]


@dataclass
class Mutation:
    """A check, how it reads in the scripts, what stands there without it, and the test that must notice."""

    name: str
    check: str
    without: str
    guard: Guard


async def repeated_calls(buffer: Any, rig: Rig) -> None:
    """The core of the test of repeated calls, on the same server."""
    outcomes: list[Any] = []
    for fault in ("none", "reply"):
        service = (await redis_rig(rig.url).service()).inner
        service._store.patience_s = test_patience.LONG_PATIENCE_S
        test_patience.inject(service, iter_faults(fault))
        try:
            outcomes.append(plain(await test_patience.whole_run(service)))
        finally:
            await service.close()
    assert outcomes[0] == outcomes[1]


async def scripts_fail_as_tests(guard: Awaitable[None]) -> None:
    """A script that breaks off is a failure of the test as well."""
    try:
        await guard
    except ResponseError as error:
        raise AssertionError(str(error)) from error


def iter_faults(fault: str) -> Iterator[str]:
    while True:
        yield fault
        yield "none"


MUTATIONS = [
    Mutation(
        "the fence of the service",
        "if tonumber(epoch) ~= current then\n    return refuse('fenced', 'service",
        "if false then\n    return refuse('fenced', 'service",
        test_services.test_a_superseded_service_changes_nothing,
    ),
    Mutation(
        "the fence of the trainer",
        "if tonumber(epoch) ~= current then\n    return refuse('fenced', 'trainer",
        "if false then\n    return refuse('fenced', 'trainer",
        test_delivery.test_a_superseded_trainer_changes_nothing,
    ),
    Mutation(
        "the identity of the run",
        "if known and known ~= ARGV[i + 1] then",
        "if false then",
        test_services.test_a_run_keeps_its_identity_and_refuses_another,
    ),
    Mutation(
        "the service epochs that are known elsewhere",
        "math.max(number(META, 'service_epoch'), tonumber(ARGV[3]))",
        "number(META, 'service_epoch')",
        test_services.test_epochs_begin_above_those_that_are_known_elsewhere,
    ),
    Mutation(
        "the trainer epochs that are known elsewhere",
        "if trainer < highest then trainer = highest + 1 end",
        "if trainer < highest then trainer = highest end",
        test_services.test_epochs_begin_above_those_that_are_known_elsewhere,
    ),
    Mutation(
        "the fence of the attempt",
        "if held[1] ~= worker or held[2] ~= attempt then",
        "if false then",
        test_generation.test_a_lease_that_expired_is_taken_over_and_the_older_attempt_fenced,
    ),
    Mutation(
        "the expected length",
        "if piece.start and piece.start ~= stored then",
        "if false then",
        lambda buffer, rig: test_generation.test_a_piece_must_start_where_the_sample_ends(buffer, rig, 4),
    ),
    Mutation(
        "the piece that is there already",
        "return piece.count > 0 and number(sample, 'num_tokens') == piece.start + piece.count",
        "return false",
        test_generation.test_the_same_call_again_changes_nothing,
    ),
    Mutation(
        "the attempt that has failed already",
        "redis.call('HGET', sample, 'failed_attempt') == attempt",
        "false",
        test_groups.test_engine_failures_are_counted_once_an_attempt_and_end_the_sample,
    ),
    Mutation(
        "the step that is durable already",
        "if step <= durable then return {'ok'} end",
        "",
        test_delivery.test_trained_frees_capacity_and_ack_consumes,
    ),
    Mutation(
        "the step that has its lease already",
        "if lease then return {'ok', lease",
        "if false then return {'ok', lease",
        test_delivery.test_the_same_step_gives_the_same_groups_for_ever,
    ),
    Mutation(
        "the nonce of a repeated call",
        "return reply and cjson.decode(reply)",
        "return nil",
        repeated_calls,
    ),
    Mutation(
        "the clock of the leases",
        "return expiry and tonumber(expiry) <= now",
        "return expiry",
        test_limits.test_only_expired_leases_are_taken,
    ),
    Mutation(
        "the cap on bytes",
        "if bytes > 0 and most_bytes > 0 and held_bytes + bytes > most_bytes then",
        "if false then",
        lambda _, rig: test_limits.test_bytes_are_reserved_for_the_longest_responses(rig),
    ),
    Mutation(
        "the cap on groups",
        "if groups > 0 and held_groups + groups > most_groups then",
        "if false then",
        lambda _, rig: test_limits.test_groups_are_admitted_up_to_the_cap(rig),
    ),
    Mutation(
        "the group that has what it wanted",
        "scored < (tonumber(known[5]) or count)",
        "true",
        lambda buffer, _: test_pool.test_the_wanted_number_of_scored_samples_makes_the_group(buffer),
    ),
    Mutation(
        "the sample that its group is READY without",
        "if not known[1] or known[1] == 'pooled' then",
        "if not known[1] then",
        test_pool.test_nothing_moves_a_sample_that_left_its_group,
    ),
    Mutation(
        "the lease of what left its group and did not run",
        "if known[1] ~= 'running' then redis.call('HSET', sample, 'worker', '') end",
        "",
        lambda buffer, _: test_pool.test_only_what_ran_may_still_hand_in_tokens(buffer),
    ),
    Mutation(
        "the samples that a forgotten group keeps its hands off",
        "if state and state ~= 'pooled' then",
        "if state then",
        lambda buffer, _: test_pool.test_pooled_samples_outlive_their_group(buffer),
    ),
    Mutation(
        "the sample that left its pool while it was to go on",
        " or gone(more) then",
        " then",
        lambda buffer, rig: scripts_fail_as_tests(
            test_pool.test_an_admission_is_prepared_again_if_a_sample_left_the_pool_meanwhile(buffer, rig)
        ),
    ),
    Mutation(
        "the age that doesn't count with epoch lag",
        "if counts_age then age",
        "if true then age",
        lambda buffer, _: test_pool.test_with_epoch_lag_any_age_goes_on_and_does_not_age_the_group(buffer),
    ),
    Mutation(
        "the age that counts",
        "if counts_age then age",
        "if false then age",
        lambda buffer, _: test_pool.test_what_is_too_old_for_its_group_expires(buffer),
    ),
    Mutation(
        "the reservation of samples that left",
        "hold(0, -bytes)",
        "",
        lambda _, rig: test_pool.test_what_is_reserved_for_samples_that_left_is_free_again(rig),
    ),
    Mutation(
        "the bytes that a pooled sample gets later",
        "count_pooled(0, piece.count)",
        "",
        test_pool.test_whoever_ran_it_hands_in_its_last_tokens,
    ),
]


@pytest.fixture
async def service(redis_server: EmbeddedRedis) -> Any:
    rig = redis_rig(redis_server.url)
    connect, opened = rig.connect, list[Any]()

    async def connect_and_note(limits: Limits | None = None) -> Any:
        opened.append(await connect(limits))
        return opened[-1]

    rig.connect = connect_and_note
    service = await rig.service()
    await service.claim_service("first")
    yield service, rig
    for buffer in opened:  # a test that fails half-way leaves its own ones open
        await buffer.close()


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Mutation], None]]:
    original = scripts.script_text

    def apply(mutation: Mutation) -> None:
        found = [p.stem for p in scripts.LUA_FOLDER.glob("*.lua") if mutation.check in original(p.stem)]
        assert found, f"the scripts no longer check {mutation.name} in these words"
        monkeypatch.setattr(
            scripts, "script_text", lambda name: original(name).replace(mutation.check, mutation.without)
        )
        scripts._digest.cache_clear()

    yield apply
    scripts._digest.cache_clear()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
async def test_without_its_check_the_guarding_test_fails(
    mutation: Mutation, service: Any, mutate: Callable[[Mutation], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffer.patience.FIRST_WAIT_S", 0.0)
    buffer, rig = service
    mutate(mutation)
    with pytest.raises((AssertionError, pytest.fail.Exception, AprilError)):
        await mutation.guard(buffer, rig)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
async def test_with_its_check_the_guarding_test_passes(mutation: Mutation, service: Any) -> None:
    await mutation.guard(*service)
