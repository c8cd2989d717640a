"""The numbers of a report, in words and with units."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import rollout_service.dashboard
from rollout_service.dashboard.facts import duration_text, facts_shown

FORMAT = Path(rollout_service.dashboard.__file__).with_name("static") / "format.js"


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
        (0.9996, "1 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (61, "1 min 01 s"),
        (3720, "1 h 02 min"),
    ],
)
def test_durations_are_written_as_on_the_page(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
    assert _on_the_page("duration", seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.00099999, "0.001"),
        (-0.00012, "-1.2e-4"),
        (999.6, "1,000"),
        (1234.5, "1,235"),
        (9999.6, "10 k"),
        (12_345, "12.3 k"),
        (999_600, "1 M"),
        (999_600_000, "1 G"),
    ],
)
def test_what_rounds_up_to_a_unit_is_written_in_it(value: float, text: str) -> None:
    assert _on_the_page("number", value) == text


def test_sizes_and_counts_have_no_digits_that_nobody_asked_for() -> None:
    assert [_on_the_page("bytes", value) for value in (1023.4, 1023.9, 1000 * 1024, 1023.9 * 1024)] == [
        "1023 B",
        "1 KiB",
        "1000 KiB",
        "1 MiB",
    ]
    assert facts_shown({"response/length_mean (last)": 999.7}) == [("Response length", "1,000")]


def _on_the_page(function: str, value: float) -> str:
    node = shutil.which("node")
    if node is None:
        pytest.skip("the page's script needs node")
    code = f"import {{ {function} }} from {json.dumps(FORMAT.as_uri())}; console.log({function}({value!r}));"
    command = [node, "--no-warnings", "--experimental-default-type=module", "--input-type=module", "-e", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
