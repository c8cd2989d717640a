"""The byte tokenizer and the folder that engines and trainers load."""

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from deploy.demo.byte_model import END_OF_SEQUENCE, end_of_sequence_id, make_model, make_tokenizer, save_policy
from deploy.demo.task import ChainSum

TOKENIZER = make_tokenizer()


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])).filter(lambda text: END_OF_SEQUENCE not in text))
def test_any_text_survives_a_round_trip_at_one_token_a_byte(text: str) -> None:
    token_ids = TOKENIZER(text)["input_ids"]
    assert len(token_ids) == len(text.encode())
    assert TOKENIZER.decode(token_ids) == text


def test_a_worked_solution_ends_in_the_end_of_sequence_and_decodes_without_it() -> None:
    solution = ChainSum((3, 5), ("-",), -2).solution()
    token_ids = TOKENIZER(solution + END_OF_SEQUENCE)["input_ids"]
    assert token_ids[-1] == end_of_sequence_id(TOKENIZER)
    assert len(token_ids) == len(solution) + 1
    assert TOKENIZER.decode(token_ids, skip_special_tokens=True) == solution


def test_a_saved_policy_loads_as_any_hugging_face_model(tmp_path: Path) -> None:
    model = make_model(seed=3)
    save_policy(model, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    token_ids = tokenizer("a3b-5\n", return_tensors="pt")["input_ids"]
    assert token_ids.tolist() == [TOKENIZER("a3b-5\n")["input_ids"]]
    assert loaded.config.eos_token_id == end_of_sequence_id(TOKENIZER)
    with torch.inference_mode():
        torch.testing.assert_close(loaded(token_ids).logits, model(token_ids).logits)


def test_seeds_make_models() -> None:
    first, again, other = (make_model(seed).model.embed_tokens.weight for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
