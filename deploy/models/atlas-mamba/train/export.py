"""Writes the model as a Hugging Face folder."""

import json

from safetensors.torch import save_file

from bpe import PADDING, TEXT_END
from model import CONFIG

TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": TEXT_END,
    "eos_token": TEXT_END,
    "unk_token": TEXT_END,
    "pad_token": PADDING,
    "model_max_length": 2048,
    "clean_up_tokenization_spaces": False,
}


def write_json(path, value):
    path.write_text(json.dumps(value, indent=1) + "\n")


def save_folder(folder, model, tokenizer):
    """The head is tied to the embeddings and therefore not stored."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)    # safetensors writes it for its owner alone
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG)
    tokenizer.save(str(folder / "tokenizer.json"))
