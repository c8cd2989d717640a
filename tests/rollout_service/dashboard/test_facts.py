"""The numbers of a report, in words and with units."""

import pytest

from rollout_service.dashboard.facts import duration_text, facts_shown


def test_first_and_last_are_one_number_with_its_unit() -> None:
    facts = {"off_policy/token_share (first)": 0.0, "off_policy/token_share (last)": 0.5, "num_tokens": 362527.0}
    assert facts_shown(facts) == [("Off-policy tokens", "0 % → 50 %"), ("Tokens generated", "362,527")]


def test_names_that_are_not_known_are_shown_too() -> None:
    assert facts_shown({"later_addition": 0.12345, "other (last)": 2.0}) == [
        ("later addition", "0.123"),
        ("other", "2"),
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0 s"),
        (0, "0 s"),
        (0.0452, "45 ms"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (61, "1 min 01 s"),
        (3720, "1 h 02 min"),
    ],
)
def test_durations_are_written_as_on_the_page(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
