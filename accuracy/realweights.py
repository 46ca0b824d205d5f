"""Make plain weights of a GGUF file, and a damaged copy; runs in the real server's environment.

python realweights.py SOURCE.gguf MODEL_FOLDER DAMAGED_FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

# Standard deviation of the noise, as a share of each weight matrix's own.
NOISE = 0.1
SEED = 0


def main(source: Path, model_folder: Path, damaged_folder: Path) -> None:
    """Dequantise `source`, save it, add noise to the MLP weights, save that."""
    disable_progress_bar()
    from_gguf = {"gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **from_gguf)
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **from_gguf)
    # The loaded model remembers that it was quantised: it cannot be saved, and no server would
    # take it. A fresh one with the same weights can.
    config = loaded.config.to_dict()
    config.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(loaded.state_dict())
    _save(model, tokenizer, model_folder)
    random = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".mlp." in name:
                noise = torch.randn(weight.shape, generator=random)
                weight += NOISE * weight.std() * noise
    _save(model, tokenizer, damaged_folder)


def _save(model: LlamaForCausalLM, tokenizer: AutoTokenizer, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
