"""A published model, as its files: weights and a tokenizer that transformers saved."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def make_model(seed=0):
    """Return the content of each file by name."""
    torch.manual_seed(seed)
    vocabulary = {
        char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    raw = Tokenizer(models.BPE(vocabulary | {"<|endoftext|>": 256}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    config = LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        bos_token_id=None, eos_token_id=256,
    )  # fmt: skip
    with TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|endoftext|>").save_pretrained(
            folder
        )
        files = {each.name: each.read_bytes() for each in Path(folder).iterdir()}
    return files | {"README.md": b"# A model\n", "original/weights.bin": b"not needed"}
