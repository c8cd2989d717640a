"""Templates, instructions and prompts that are too long."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import DataError
from protocol.settings.data import Truncation
from rollout_service.prompts.encode import truncate
from rollout_service.prompts.load import load_prompts


@pytest.fixture
def decode(chat_tokenizer):
    """Text of token ids, special tokens shown."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(chat_tokenizer, local_files_only=True)
    return lambda prompt: tokenizer.decode(prompt.token_ids, skip_special_tokens=False)


def row(prompt, **more):
    return {"prompt": prompt, "ground_truth": 1, **more}


def test_chat_template(make_settings, write_lines, decode):
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    settings = make_settings(
        train_files=[write_lines(row("q ä"), name="text.jsonl"), write_lines(row(messages), name="chat.jsonl")],
        system_prompt="be brief",
        instruction="Think.",
    )
    plain, chat = load_prompts(settings).train
    assert decode(plain) == "<system>be brief|<user>q ä Think.|<assistant>"
    assert decode(chat) == "<system>be brief|<user>one|<assistant>two|<user>three Think.|<assistant>"
    assert (plain.text, chat.text) == ("q ä Think.", "three Think.")


def test_without_a_template_the_text_is_sent_as_it_is(make_settings, write_lines, decode, plain_tokenizer):
    text = write_lines(row(" a\n"), name="text.jsonl")
    chat = write_lines(row([{"role": "user", "content": "b"}]), name="chat.jsonl")
    settings = make_settings(tokenizer=plain_tokenizer, train_files=[text, chat], apply_chat_template=False)
    assert [decode(p) for p in load_prompts(settings).train] == [" a\n", "b"]
    settings.data.instruction = "\nThink."
    assert decode(load_prompts(settings).train[1]) == "b\nThink."


def test_arguments_reach_the_template(make_settings, write_lines, decode):
    files = {"train_files": [write_lines(row("q"))]}
    settings = make_settings(**files, apply_chat_template_kwargs={"enable_thinking": False})
    assert decode(load_prompts(settings).train[0]) == "<user>q|<assistant><think></think>"
    assert decode(load_prompts(make_settings(**files)).train[0]) == "<user>q|<assistant>"


def test_arguments_that_the_template_does_not_read(make_settings, write_lines):
    settings = make_settings(train_files=[write_lines(row("q"))], apply_chat_template_kwargs={"enable_thinkin": False})
    with pytest.raises(DataError, match="has 'enable_thinkin', which the tokenizer's chat template does not read"):
        load_prompts(settings)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"apply_chat_template_kwargs": {"tokenize": True}}, "leave out tokenize: the service sets it itself"),
        ({"apply_chat_template_kwargs": {"x": 1}, "apply_chat_template": False}, "needs a chat template"),
    ],
)
def test_template_arguments_that_are_refused_at_once(make_settings, data, words):
    with pytest.raises(ValueError, match=words):
        make_settings(**data)


def test_no_special_token_is_added(make_settings, write_lines):
    settings = make_settings(train_files=[write_lines(row("abc"))], apply_chat_template=False)
    assert len(load_prompts(settings).train[0].token_ids) == 3


@pytest.mark.parametrize(
    ("prompt", "data", "words"),
    [
        ([{"role": "robot", "content": "x"}, {"role": "user", "content": "x"}], {}, "refuses its messages .*robot"),
        ([{"role": "assistant", "content": "x"}], {}, "none of its messages is the user's"),
        (
            [{"role": "system", "content": "x"}, {"role": "user", "content": "x"}],
            {"system_prompt": "y"},
            "has a system message of its own",
        ),
        ([{"role": "user", "content": "x"}] * 2, {"apply_chat_template": False}, "has 2 chat messages; set"),
        ("x", {"apply_chat_template": False, "system_prompt": "y"}, "data.system_prompt needs a chat template"),
    ],
)
def test_messages_that_do_not_fit(make_settings, write_lines, prompt, data, words):
    with pytest.raises(DataError, match=words):
        load_prompts(make_settings(train_files=[write_lines(row(prompt))], **data))


def test_too_long_is_an_error_that_names_the_row(make_settings, write_lines):
    path = write_lines(row("short"), row("x" * 100), row("y" * 120))
    settings = make_settings(train_files=[path], max_prompt_length=50, apply_chat_template=False)
    with pytest.raises(DataError) as raised:
        load_prompts(settings)
    assert re.search(r"train\.jsonl line 2: the prompt has 100 tokens, more than .* = 50; raise it", str(raised.value))
    assert "(2 of 3 prompts are too long, the longest has 120)" in str(raised.value)


def test_too_long_is_filtered_and_the_others_keep_their_ids(make_settings, write_lines):
    path = write_lines(row("x" * 60), row("short"), row("y" * 60), row("last"))
    settings = make_settings(
        train_files=[path], val_files=[path], max_prompt_length=50, filter_overlong_prompts=True, num_val_prompts=1
    )
    loaded = load_prompts(settings)
    assert [p.prompt_id for p in loaded.train] == ["train:1", "train:3"]
    assert [p.prompt_id for p in loaded.validation] == ["val/train:1"]
    assert loaded.num_filtered == 4


def test_nothing_is_left(make_settings, write_lines):
    settings = make_settings(train_files=[write_lines(row("xyz"))], max_prompt_length=2, filter_overlong_prompts=True)
    with pytest.raises(DataError, match=r"all 1 training prompts are longer .* = 2 tokens \(the shortest has 21\)"):
        load_prompts(settings)


def test_nothing_held_out_is_left(make_settings, write_lines):
    files = {"train_files": [write_lines(row("x"))], "val_files": [write_lines(row("x" * 60), name="val.jsonl")]}
    with pytest.raises(DataError, match=r"all 1 validation prompts are longer than data.max_prompt_length = 50"):
        load_prompts(make_settings(**files, max_prompt_length=50, filter_overlong_prompts=True))


@pytest.mark.parametrize(("how", "text"), [("left", "efghi"), ("right", "abcde"), ("middle", "abghi")])
def test_truncation(make_settings, write_lines, decode, how, text):
    settings = make_settings(
        train_files=[write_lines(row("abcdefghi"))], max_prompt_length=5, truncation=how, apply_chat_template=False
    )
    loaded = load_prompts(settings)
    assert decode(loaded.train[0]) == text
    assert (loaded.num_truncated, loaded.num_filtered) == (1, 0)


@given(st.lists(st.integers(), min_size=2), st.data(), st.sampled_from([*Truncation][1:]))
def test_truncation_keeps_exactly_the_limit_in_order(ids, data, how):
    limit = data.draw(st.integers(1, len(ids) - 1))
    kept = truncate(ids, limit, how)
    assert len(kept) == limit
    rest = iter(ids)
    assert all(token in rest for token in kept)


def test_tokenizers_that_are_none(make_settings, write_lines, tmp_path, plain_tokenizer):
    files = {"train_files": [write_lines(row("a"))]}
    with pytest.raises(DataError, match=r"set model.path, or model.tokenizer_path"):
        load_prompts(make_settings(tokenizer=None, **files))
    with pytest.raises(DataError, match="nowhere is not a folder"):
        load_prompts(make_settings(tokenizer=tmp_path / "nowhere", **files))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty has no tokenizer that can be loaded"):
        load_prompts(make_settings(tokenizer=tmp_path / "empty", **files))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="broken has no tokenizer that can be loaded"):
        load_prompts(make_settings(tokenizer=tmp_path / "broken", **files))
    with pytest.raises(DataError, match=r"has no chat template; set data.apply_chat_template = false"):
        load_prompts(make_settings(tokenizer=plain_tokenizer, **files))
