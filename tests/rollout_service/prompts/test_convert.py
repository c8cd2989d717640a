"""Questions and answers become Parquet that a run reads."""

from pathlib import Path

import pyarrow.parquet
import pytest

from protocol.errors import DataError
from rollout_service.prompts.convert import Conversion, convert
from rollout_service.prompts.load import load_prompts

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k"
QUESTION = {"question": "How many?", "answer": "Many: <<1000+2=1002>>1002.\n#### 1,002"}


def rows_of(path):
    return pyarrow.parquet.read_table(path).to_pylist()


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def test_gsm8k_becomes_what_verl_prepares(write_lines, tmp_path):
    out = tmp_path / "out.parquet"
    assert convert([write_lines(QUESTION, QUESTION)], out, Conversion(split="test", instruction="Think.")) == 2
    assert rows_of(out)[1] == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "How many? Think."}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1002"},
        "extra_info": {"split": "test", "index": 1, **QUESTION},
    }


def test_what_is_written_is_read_by_a_run(make_settings, write_lines, tmp_path):
    out = tmp_path / "out.parquet"
    convert([write_lines(QUESTION)], out, Conversion(system_prompt="Be brief."))
    [prompt] = load_prompts(make_settings(train_files=[out])).train
    assert (prompt.ground_truth, prompt.text, prompt.data_source) == ("1002", "How many?", "openai/gsm8k")
    assert prompt.extra["answer"] == QUESTION["answer"]


def test_tables_by_the_names_of_their_columns(tmp_path):
    out, how = tmp_path / "out.parquet", Conversion(prompt_column="q", answer_column="a", data_source="sums")
    comma = write(tmp_path / "one.csv", '\ufeffid,q,a\n1,"two, and\n three",5\n\n2,x, y \n')
    tab = write(tmp_path / "two.tsv", "a\tq\n7\tz\n")
    assert convert([comma, tab], out, how) == 3
    rows = rows_of(out)
    assert [row["prompt"][0]["content"] for row in rows] == ["two, and\n three", "x", "z"]
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["5", "y", "7"]
    assert [row["extra_info"]["index"] for row in rows] == [0, 1, 2]
    assert {row["data_source"] for row in rows} == {"sums"}


def test_lines_by_the_names_of_their_columns(write_lines, tmp_path):
    path = write_lines({"q": "x", "a": 3}, {"q": "y", "a": 0.5}, name="numbers.jsonl")
    convert([path], tmp_path / "out.parquet", Conversion(prompt_column="q", answer_column="a"))
    rows = rows_of(tmp_path / "out.parquet")
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["3", "0.5"]
    assert rows[0]["data_source"] == "numbers"


NAMED = Conversion(prompt_column="q", answer_column="a")


@pytest.mark.parametrize(
    ("name", "data", "how", "words"),
    [
        ("t.jsonl", '{"q": "x"}', NAMED, r"t\.jsonl line 1 has no column 'a', only q"),
        ("t.jsonl", '{"q": "x", "a": null}', NAMED, "line 1: 'a' is null; it must be text or a number"),
        ("t.jsonl", '{"q": "x", "a": true}', NAMED, "line 1: 'a' is true; it must be"),
        ("t.jsonl", '{"q": "x", "a": ["1"]}', NAMED, "line 1: 'a' is a list; it must be"),
        ("t.jsonl", '{"q": " ", "a": 1}', NAMED, "line 1: 'q' is empty; fill it"),
        ("t.jsonl", '{"q": "\\ud800", "a": 1}', NAMED, "half a surrogate pair"),
        ("t.jsonl", '{"q": "x"}', Conversion(), "has no question and answer as text, only q; name the columns by"),
        ("t.jsonl", '{"question": "x", "answer": "7"}', Conversion(), "has no '#### NUMBER'"),
        ("t.jsonl", "\n", Conversion(), r"t\.jsonl has no rows"),
        ("t.jsonl", b'{"q": "\xff"}', NAMED, r"line 1 is not UTF-8 \(byte 0xff"),
        ("t.csv", b"q,a\nx,1\ncaf\xe9,2\n", NAMED, r"t\.csv line 3 is not UTF-8 \(byte 0xe9 at 3\)"),
        ("t.csv", "q,a\nx,1,2\n", NAMED, r"t\.csv line 2 has 3 cells and the header 2; mend the row"),
        ("t.csv", "q,q\nx,1\n", NAMED, "the header must name every column, and each differently"),
        ("t.csv", 'q,a\n"x"y,1\n', NAMED, "line 2 is no row of a table"),
        ("t.csv", "", NAMED, r"t\.csv has no rows"),
        ("t.xlsx", "", NAMED, "is neither .jsonl nor .csv nor .tsv"),
        ("t.jsonl", "", Conversion(prompt_column="q"), "name both columns"),
    ],
)
def test_bad_input_is_named_and_leaves_nothing_behind(tmp_path, name, data, how, words):
    source = write(tmp_path / name, data)
    with pytest.raises(DataError, match=words):
        convert([source], tmp_path / "out.parquet", how)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_outputs_that_can_not_be(write_lines, tmp_path):
    source, out = write_lines(QUESTION), tmp_path / "out.parquet"
    out.write_text("mine")
    with pytest.raises(DataError, match=r"out\.parquet exists; name another file, or say --force"):
        convert([source], out, Conversion())
    assert out.read_text() == "mine"
    assert convert([source], out, Conversion(), overwrite=True) == 1
    with pytest.raises(DataError, match="nowhere is not a folder; make it"):
        convert([source], tmp_path / "nowhere" / "out.parquet", Conversion())
    with pytest.raises(DataError, match="does not exist; name a JSONL, CSV or TSV file"):
        convert([tmp_path / "nothing.jsonl"], tmp_path / "other.parquet", Conversion())


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the GSM8K files are not beside this repository")
def test_gsm8k_itself(tmp_path, make_settings):
    out = tmp_path / "test.parquet"
    assert convert([GSM8K / "test.jsonl"], out, Conversion(split="test")) == 1319
    lines = load_prompts(make_settings(train_files=[GSM8K / "test.jsonl"], max_prompt_length=2048)).train
    parquet = load_prompts(make_settings(train_files=[out], max_prompt_length=2048)).train
    assert [(p.token_ids, p.ground_truth) for p in parquet] == [(p.token_ids, p.ground_truth) for p in lines]
