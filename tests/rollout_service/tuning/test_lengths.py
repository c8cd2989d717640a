"""Where lengths come from: distributions, lists, columns, traces; and what a trace's statistics say."""

import math
import random
from pathlib import Path
from statistics import fmean, median, stdev

import numpy as np
import pytest

from protocol.errors import AprilError, DataError, SettingsError
from rollout_service.tuning.length_specs import parse_lengths
from rollout_service.tuning.lengths import FlatLengths, GroupedLengths, completed, lengths_of_trace
from rollout_service.tuning.lengths_stats import trace_statistics
from rollout_service.tuning.survival import kaplan_meier
from rollout_service.tuning.trace_convert import converted, read_lengths
from rollout_service.tuning.trace_reader import read_trace
from rollout_service.tuning.trace_records import ScoreLine
from tests.rollout_service.tuning.records import attempt, header


def drawn(spec: str, count: int = 3000, samples: int = 4) -> list[tuple[int, ...]]:
    """Lengths of many prompts."""
    mixture = parse_lengths(spec)
    return [mixture.prompt(i, samples).lengths for i in range(count)]


def test_lognormal_has_its_median_and_sigma() -> None:
    logs = [math.log(length) for prompt in drawn("lognormal:median=500,sigma=0.7") for length in prompt]
    assert math.exp(median(logs)) == pytest.approx(500, rel=0.05)
    assert stdev(logs) == pytest.approx(0.7, rel=0.05)


def test_two_levels_split_the_variance_between_and_within_prompts() -> None:
    logs = [[math.log(length) for length in p] for p in drawn("lognormal:median=500,between=0.8,within=0.3", samples=8)]
    within = fmean(stdev(p) ** 2 for p in logs)
    between = stdev([fmean(p) for p in logs]) ** 2 - within / 8
    assert within == pytest.approx(0.09, rel=0.1)
    assert between == pytest.approx(0.64, rel=0.1)


def test_mixture_max_and_prompt_tokens() -> None:
    prompts = drawn("0.75*lognormal:median=10,sigma=0+0.25*lognormal:median=900,sigma=0,max=700")
    assert {length for p in prompts for length in p} == {10, 700}
    assert fmean(p[0] == 700 for p in prompts) == pytest.approx(0.25, abs=0.03)
    assert parse_lengths("lognormal:median=5,sigma=1,prompt=33").prompt(0, 2).prompt_tokens == 33


def test_prompts_depend_on_seed_and_index_alone() -> None:
    one, other = parse_lengths("lognormal:median=50,sigma=1", 1), parse_lengths("lognormal:median=50,sigma=1", 2)
    assert one.prompt(7, 4) == one.prompt(7, 4)
    assert one.prompt(7, 4) != one.prompt(8, 4)
    assert one.prompt(7, 4) != other.prompt(7, 4)


@pytest.mark.parametrize(
    "spec",
    ["normal:mean=3", "lognormal:sigma=1", "lognormal:median=-1,sigma=1", "lognormal:median=x", "lognormal:median=nan",
     "lognormal:median=5,sigma=1,within=1", "lognormal:median=5,sgima=1", "-1*lognormal:median=5"],
)  # fmt: skip
def test_distributions_that_are_none(spec: str) -> None:
    with pytest.raises(SettingsError):
        parse_lengths(spec)


def test_a_csv_column_and_a_list(tmp_path: Path) -> None:
    csv_file = tmp_path / "a.csv"
    csv_file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nx,100,5\ny,200,7\nz,300,0\n")
    found = read_lengths(str(csv_file), "GeneratedTokens", "ContextTokens")
    assert isinstance(found, FlatLengths)
    assert found.lengths == (5, 7), "a response without a token never ran"
    assert found.prompt_tokens == (100, 200), "each length has its own prompt's"
    plain = tmp_path / "a.txt"
    plain.write_text("# tokens\n5 20\n\n0 25\n7 30\n")
    listed = read_lengths(str(plain), None, None)
    assert isinstance(listed, FlatLengths)
    assert (listed.lengths, listed.prompt_tokens) == ((5, 7), (20, 30))


@pytest.mark.parametrize(
    "text",
    ["t,ctx,gen\na,1,5\nb,2,7\n", "\ufefft,ctx,gen\r\na,1,5\r\nb,2,7\r\n", "t;ctx;gen\na;1;5\nb;2;7\n",
     "t\tctx\tgen\na\t1\t5\nb\t2\t7\n", "t, ctx, gen\na, 1, 5\n\nb, 2, 7\n",
     '"t","ctx","gen"\n"say ""a,b""\nand c","1","5"\n"\u2028",2,7.0\n'],
    ids=["commas", "windows", "semicolons", "tabs", "spaces", "quotes"],
)  # fmt: skip
def test_csv_as_it_is_written_elsewhere(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(text.encode())
    found = read_lengths(str(file), "gen", "ctx")
    assert isinstance(found, FlatLengths)
    assert (found.lengths, found.prompt_tokens) == ((5, 7), (1, 2))


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [("a,b\n1,2\n", "c", "columns are a, b"), ("a\n1\nx\n", "a", "line 3"), ("a\n-4\n", "a", "line 2"),
     ("a\n", "a", "no length above zero"), ("a\n1\n", None, "one of"), ("a\n1.5\n", "a", "line 2"),
     ("a\n1\nnan\n", "a", "line 3: 'nan'"), ("a\ninf\n", "a", "line 2: 'inf'"), ("a\n1e30\n", "a", "line 2: '1e30'"),
     ("", "a", "no header"), ("", None, "no header"), ("a,b\n1,2\n3\n", "b", "line 3: ''"),
     ("a,b\n1,2,3\n", "a", "3 fields and the header 2"), ("a,a\n1,2\n", "a", "2 columns 'a'"),
     ("a,b\n" + "x" * 200_000 + ",2\n", "b", "line 2 is no CSV")],
)  # fmt: skip
def test_columns_that_have_no_lengths(tmp_path: Path, text: str, column: str | None, message: str) -> None:
    file = tmp_path / "a.csv"
    file.write_text(text)
    with pytest.raises(AprilError, match=message) as raised:
        read_lengths(str(file), column, None)
    assert raised.value.exit_code == 2


def test_files_and_columns_that_do_not_go_together(tmp_path: Path) -> None:
    plain = tmp_path / "a.txt"
    plain.write_text("5\n7 30\n")
    for source, column, message in (
        (str(plain), None, "on some lines only"),
        (str(tmp_path / "b.csv"), "a", "no file"),
        ("lognormal:median=5", "a", "a distribution has no column"),
        (str(tmp_path), "a", "is a trace"),
    ):
        with pytest.raises(AprilError, match=message) as raised:
            read_lengths(source, column, None)
        assert raised.value.exit_code == 2
    plain.write_bytes("5\n".encode("utf-16"))
    with pytest.raises(DataError, match="no text in UTF-8"):
        read_lengths(str(plain), None, None)


def test_a_conversion_is_read_back(tmp_path: Path) -> None:
    lengths = read_lengths("lognormal:median=50,sigma=1,prompt=9", None, None)
    file = tmp_path / "out.jsonl"
    file.write_text("\n".join(line.model_dump_json() for line in converted(lengths, 20, 4)) + "\n")
    back = lengths_of_trace(read_trace(file))
    assert isinstance(back, GroupedLengths)
    workload = lengths.workload(0, False)
    assert [p.lengths for p in back.prompts] == [workload.prompt(i, 4).lengths for i in range(20)]
    assert {p.prompt_tokens for p in back.prompts} == {9}


def test_unfinished_lengths_are_completed_from_those_that_get_so_far() -> None:
    survival = kaplan_meier([10] * 50 + [100] * 25 + [1000] * 25, [True] * 100)
    rng = random.Random(0)
    whole = [completed(survival, 50, rng) for _ in range(400)]
    assert set(whole) == {100, 1000}
    assert fmean(w == 100 for w in whole) == pytest.approx(0.5, abs=0.08)
    assert completed(survival, 5000, rng) == 5000, "nothing is known of longer ones"


def write(path: Path, *lines) -> Path:
    path.write_text("\n".join(line.model_dump_json() for line in (header(), *lines)) + "\n")
    return path


def test_statistics_count_the_unfinished(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines = []
    for index, true in enumerate(rng.lognormal(4, 1, 2000).astype(int) + 1):
        seen = int(rng.uniform(1, 400))
        done = true <= seen
        lines.append(attempt(f"g{index}.000", int(min(true, seen)), end="stop" if done else "parked"))
        if done:
            lines.append(ScoreLine(sample=f"g{index}.000", reward=1.0 if true < 60 else 0.0))
    found = trace_statistics(read_trace(write(tmp_path / "a.jsonl", *lines)))
    exact = float(np.median(rng.lognormal(4, 1, 100_000)))
    half = found.quantiles[0]
    assert half.lower is not None
    assert half.upper is not None
    assert half.lower <= exact <= half.upper * 1.05
    assert found.mean_finished < 0.85 * found.mean_length
    assert found.bins[0].mean_reward == 1.0
    assert found.bins[-1].mean_reward == 0.0
    assert found.bins[0].stop_share == 1.0
    assert "no finished round" in found.notes[0]


def test_stragglers_are_slow_every_time(tmp_path: Path) -> None:
    lines = []
    for index in range(60):
        prompt = f"p{index % 20}"
        slow = prompt == "p3" or (prompt == "p4" and index < 20)
        lines.append(attempt(f"g{index}.000", 900 + index if slow else 10 + index, prompt=prompt))
    found = trace_statistics(read_trace(write(tmp_path / "a.jsonl", *lines)))
    assert [s.prompt for s in found.stragglers] == ["p3"]
    assert found.stragglers[0].times_seen == 3


def test_one_length_only_is_said(tmp_path: Path) -> None:
    lines = [attempt(f"g{index}.000", 64, end="length") for index in range(10)]
    found = trace_statistics(read_trace(write(tmp_path / "a.jsonl", *lines)))
    assert any("every response has 64 tokens" in note for note in found.notes)
    assert found.tail == 1


def test_no_finished_sample_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has finished"):
        trace_statistics(read_trace(write(tmp_path / "a.jsonl", attempt("g1.000", 5, end="lost"))))
