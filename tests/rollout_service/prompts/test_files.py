"""Parquet and JSONL files, as verl and GSM8K write them."""

import decimal
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from protocol.errors import DataError, SettingsError
from protocol.settings import load_settings
from rollout_service.prompts.load import load_prompts
from rollout_service.prompts.repeats import Repeats, count_repeats

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k"
QUESTION = {"question": "How many?", "answer": "Many: <<1000+2=1002>>1002.\n#### 1,002"}


def write_parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    return path


def verl_row(i):
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"question {i}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i)},
        "extra_info": {"split": "train", "index": i},
    }


def test_parquet_as_verl_writes_it(make_settings, tmp_path):
    path = write_parquet(tmp_path / "train.parquet", [verl_row(i) for i in range(5)])
    prompts = load_prompts(make_settings(train_files=[path], val_files=[path])).train
    assert [p.prompt_id for p in prompts] == [f"openai/gsm8k:{i}" for i in range(5)]
    assert [p.ground_truth for p in prompts] == list("01234")
    assert prompts[3].text == "question 3"
    assert prompts[3].extra == {"split": "train", "index": 3}


def test_parquet_in_the_format_of_gsm8k(make_settings, tmp_path):
    path = write_parquet(tmp_path / "gsm.parquet", [QUESTION])
    [prompt] = load_prompts(make_settings(train_files=[path])).train
    assert (prompt.ground_truth, prompt.data_source) == ("1002", "openai/gsm8k")


def test_numbers_of_parquet_become_json(make_settings, tmp_path):
    rows = [{"prompt": "q", "ground_truth": decimal.Decimal("1.50"), "extra_info": {"x": 3}}]
    [prompt] = load_prompts(make_settings(train_files=[write_parquet(tmp_path / "t.parquet", rows)])).train
    assert prompt.ground_truth == 1.5
    assert prompt.data_source == "t"


def test_gsm8k_lines(make_settings, write_lines):
    path = write_lines(QUESTION, QUESTION)
    loaded = load_prompts(make_settings(train_files=[path], val_files=[path]))
    assert [p.prompt_id for p in loaded.train] == ["openai/gsm8k:0", "openai/gsm8k:1"]
    assert [p.prompt_id for p in loaded.validation] == ["val/openai/gsm8k:0", "val/openai/gsm8k:1"]
    assert loaded.train[0].ground_truth == "1002"
    assert loaded.train[0].text == "How many?"


def test_several_files_are_numbered_through(make_settings, write_lines):
    first = write_lines({"prompt": "a", "ground_truth": 1}, name="one.jsonl")
    second = write_lines({"prompt": "b", "ground_truth": 1}, {"prompt": "c", "ground_truth": 2}, name="two.jsonl")
    prompts = load_prompts(make_settings(train_files=[first, second])).train
    assert [p.prompt_id for p in prompts] == ["one:0", "two:0", "two:1"]


def test_blank_lines_and_a_byte_order_mark(make_settings, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "ground_truth": 1}\n\n  \n{"prompt": "b", "ground_truth": 1}')
    assert len(load_prompts(make_settings(train_files=[path])).train) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prompt": "a", "ground_truth": 1}\n{"prompt": \n', r"t\.jsonl line 2 is not JSON"),
        ("[1]\n", "line 1 is not a JSON object"),
        ("null\n", "line 1 is not a JSON object"),
        ("\n", r"t\.jsonl has no rows"),
        ('{"text": "a", "label": 1}', "line 1 has no column 'prompt', only text, label; set data.prompt_key"),
        ('{"prompt": "a", "label": 1}', "has no reward_model.ground_truth or ground_truth, only prompt, label"),
        ('{"prompt": "", "ground_truth": 1}', "the prompt is empty"),
        ('{"prompt": 3, "ground_truth": 1}', "the prompt is a number; it must be text or a list of messages"),
        ('{"prompt": [], "ground_truth": 1}', "the prompt is an empty list; it must be"),
        ('{"prompt": [{"role": "user"}], "ground_truth": 1}', "must have 'role' and 'content'"),
        ('{"prompt": "a", "ground_truth": 1, "extra_info": 3}', "extra_info is a number; it must be an object"),
        ('{"prompt": "\\ud800", "ground_truth": 1}', "line 1: the text holds half a surrogate pair"),
        (
            '{"prompt": "a", "ground_truth": 1, "data_source": "\\ud800"}',
            "line 1: the text holds half a surrogate pair",
        ),
        ('{"prompt": "a", "ground_truth": ["\\ud800"]}', "line 1: a label or its extra_info holds half a surrogate"),
        ('{"prompt": "a", "ground_truth": 1, "extra_info": {"\\ud800": 1}}', "extra_info holds half a surrogate pair"),
        ('{"prompt": [{"role": "user", "content": "\\ud800"}], "ground_truth": 1}', "holds half a surrogate pair"),
        ('{"question": "a", "answer": "7"}', "looks like GSM8K .* no '#### NUMBER'"),
    ],
)
def test_bad_lines_are_named(make_settings, tmp_path, text, words):
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=words):
        load_prompts(make_settings(train_files=[path]))


def test_a_folder_is_no_file(make_settings, tmp_path):
    with pytest.raises(DataError, match="is a folder; name the Parquet or JSONL files in it"):
        load_prompts(make_settings(train_files=[tmp_path]))


def test_bytes_that_are_no_text(make_settings, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"line 1 is not UTF-8 \(byte 0xff at 12\); write the file as UTF-8"):
        load_prompts(make_settings(train_files=[path]))


def test_bytes_that_are_no_text_in_parquet(make_settings, tmp_path):
    texts = pyarrow.StringArray.from_buffers(2, *pyarrow.array([b"fine", b"caf\xe9"], pyarrow.binary()).buffers()[1:])
    table = pyarrow.table({"prompt": texts, "ground_truth": ["1", "2"]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"t\.parquet row 1: column 'prompt' is not UTF-8; write the file again"):
        load_prompts(make_settings(train_files=[tmp_path / "t.parquet"]))


def test_rows_of_parquet_are_named(make_settings, tmp_path):
    rows = [verl_row(i) for i in range(3)]
    rows[2]["reward_model"] = {"style": "rule", "ground_truth": None}
    with pytest.raises(
        DataError, match=r"t\.parquet row 2 has null as its reward_model.ground_truth or ground_truth; the scorer"
    ):
        load_prompts(make_settings(train_files=[write_parquet(tmp_path / "t.parquet", rows)]))
    with pytest.raises(DataError, match=r"t\.parquet row 0 has no column 'text', only data_source, prompt, ability"):
        load_prompts(make_settings(train_files=[tmp_path / "t.parquet"], prompt_key="text"))
    empty = pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())})
    pyarrow.parquet.write_table(empty, tmp_path / "none.parquet")
    with pytest.raises(DataError, match=r"none\.parquet has no rows; name a file with prompts"):
        load_prompts(make_settings(train_files=[tmp_path / "none.parquet"]))


def test_two_kinds_of_prompts_in_one_file(make_settings, write_lines):
    chat = [{"role": "user", "content": "b"}]
    path = write_lines({"prompt": "a", "ground_truth": 1}, {"prompt": chat, "ground_truth": 1})
    with pytest.raises(DataError, match=r"line 2: the prompt is a list, while that of .* line 1 is text; write all"):
        load_prompts(make_settings(train_files=[path]))


def test_one_path_is_a_list_of_one(make_settings, write_lines):
    path = write_lines({"prompt": "a", "ground_truth": 1})
    settings = make_settings(train_files=str(path), val_files=path)
    assert settings.data.train_files == settings.data.val_files == [path]
    assert make_settings(train_files="~/x.parquet").data.train_files == [Path.home() / "x.parquet"]
    assert len(load_prompts(settings).train) == 1


@pytest.mark.parametrize(
    ("text", "paths"), [("a.jsonl", ["a.jsonl"]), ('["a.jsonl", "b.parquet"]', ["a.jsonl", "b.parquet"])]
)
def test_paths_from_the_environment(monkeypatch, text, paths):
    monkeypatch.setenv("APRIL_DATA__TRAIN_FILES", text)
    assert load_settings(None).data.train_files == [Path(path) for path in paths]


def test_paths_that_are_none(monkeypatch):
    monkeypatch.setenv("APRIL_DATA__TRAIN_FILES", '["a.jsonl"')
    with pytest.raises(SettingsError, match="is neither a path nor a JSON list of paths"):
        load_settings(None)


def test_repeats_are_counted_and_said(make_settings, write_lines, caplog):
    same = {"prompt": "a", "ground_truth": 1}
    path = write_lines(same, same, {**same, "ground_truth": 2}, {"prompt": "b", "ground_truth": 1})
    held_out = write_lines(same, {"prompt": "c", "ground_truth": 1}, name="val.jsonl")
    loaded = load_prompts(make_settings(train_files=[path], val_files=[held_out]))
    assert count_repeats(loaded) == Repeats(num_repeated=2, num_contradictory=1, num_held_out=1)
    assert "2 training prompts repeat an earlier one" in caplog.text
    assert "1 training prompts repeat an earlier one with another right answer" in caplog.text
    assert "1 held-out prompts also occur in training" in caplog.text


def test_a_held_out_part_keeps_every_source(make_settings, write_lines):
    rows = [
        {"prompt": f"{n}{i}", "ground_truth": 1, "data_source": n} for n, c in (("a", 9), ("b", 1)) for i in range(c)
    ]
    path = write_lines(*rows)
    loaded = load_prompts(make_settings(train_files=[path], val_files=[path], num_val_prompts=3))
    assert [p.prompt_id for p in loaded.validation] == ["val/a:0", "val/a:1", "val/b:0"]


def test_files_that_are_none(make_settings, tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.jsonl does not exist; .*relative paths start at"):
        load_prompts(make_settings(train_files=["nowhere.jsonl"]))
    (tmp_path / "t.csv").write_text("a,b")
    with pytest.raises(DataError, match=r"t\.csv is neither a \.parquet nor a \.jsonl file"):
        load_prompts(make_settings(train_files=[tmp_path / "t.csv"]))
    (tmp_path / "t.parquet").write_text("PAR1 is not enough")
    with pytest.raises(DataError, match=r"t\.parquet can't be read as Parquet"):
        load_prompts(make_settings(train_files=[tmp_path / "t.parquet"]))


def test_a_scorer_of_ones_own_may_do_without_labels(make_settings, write_lines):
    settings = make_settings(train_files=[write_lines({"prompt": "a"})], reward="own:f")
    assert load_prompts(settings).train[0].ground_truth is None


def test_another_column(make_settings, write_lines):
    settings = make_settings(train_files=[write_lines({"text": "a", "ground_truth": 1})], prompt_key="text")
    assert load_prompts(settings).train[0].text == "a"


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the GSM8K files are not beside this repository")
def test_gsm8k_itself(make_settings):
    files = {"train_files": [GSM8K / "train_first_1000.jsonl"], "val_files": [GSM8K / "test.jsonl"]}
    loaded = load_prompts(make_settings(**files, max_prompt_length=2048, num_val_prompts=2000))
    assert (len(loaded.train), len(loaded.validation), loaded.num_filtered) == (1000, 1319, 0)
    assert all(float(str(p.ground_truth)) is not None for p in loaded.train + loaded.validation)
    assert loaded.train[0].ground_truth == "72"
