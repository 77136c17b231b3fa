"""Sampling against transformers, and against its own definition."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.limits import limited
from trainer.engine.core.errors import RecipeError
from trainer.engine.inference.generate import generate as generate_opened
from trainer.engine.inference.generate import sampling_probabilities
from trainer.engine.inference.open import OpenedModel
from trainer.engine.parallel.materialize import materialize
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer
from trainer.kernels.choose import choose
from trainer.model_zoo.language_model import LanguageModel
from trainer.model_zoo.llama3.config import Llama3Config

PROMPTS = ["def main(", "x", "import os, sys", ""]


@pytest.fixture(scope="module")
def model():
    config = Llama3Config(dim=64, n_layers=2, vocab_size=257, init_std=0.3)
    model = config.build(choose({}, "cpu", 128))
    materialize(model, torch.device("cpu"), seed=1)
    return model.eval()


@pytest.fixture(scope="module")
def theirs(model):
    config = model.config
    peer = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab,
            hidden_size=config.dim,
            intermediate_size=config.ffn_dim,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            rms_norm_eps=config.norm_eps,
            rope_theta=config.rope_theta,
            max_position_embeddings=config.max_seq_len,
            tie_word_embeddings=False,
        )
    )
    state = {config.layout.to_hf(name): value for name, value in model.state_dict().items()}
    peer.load_state_dict(state)
    return peer.eval()


def generate(model, tokenizer, prompts, longest=None, **options):
    recipe = SimpleNamespace(model=SimpleNamespace(max_seq_len=longest))
    return generate_opened(OpenedModel(model, tokenizer, Path(), None, recipe), prompts, **options)


def greedy(model, prompts, count=24):
    return generate(model, ByteTokenizer(), prompts, max_new_tokens=count, temperature=0.0)


def test_greedy_generation_equals_that_of_transformers(model, theirs):
    for prompt in PROMPTS[:3]:
        tokens = torch.tensor([list(prompt.encode())])
        out = theirs.generate(
            tokens, max_new_tokens=24, do_sample=False, eos_token_id=256, pad_token_id=256
        )
        expected = ByteTokenizer().decode(out[0, tokens.shape[1] :].tolist())
        assert greedy(model, [prompt]) == [expected]


def test_prompts_of_different_lengths_do_not_influence_each_other(model):
    together = greedy(model, PROMPTS)
    assert together == [greedy(model, [prompt])[0] for prompt in PROMPTS]
    options = {"max_new_tokens": 16, "temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 7}
    together = generate(model, ByteTokenizer(), PROMPTS, **options)
    alone = [generate(model, ByteTokenizer(), [prompt], **options)[0] for prompt in PROMPTS]
    assert together == alone


def test_a_long_prompt_is_computed_in_pieces_and_continued_as_in_one(model, monkeypatch):
    prompts = ["def main(argv): return 0", "import os, sys", "x"]
    whole = greedy(model, prompts)
    lengths = []
    hook = model.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    monkeypatch.setattr("trainer.engine.inference.generate.PREFILL_TOKENS", 7)
    assert greedy(model, prompts) == whole
    hook.remove()
    assert lengths[:4] == [7, 7, 7, 3]
    assert set(lengths[4:]) == {1}


def test_a_prompt_longer_than_the_model_reads_is_refused_or_cut_on_request(model):
    options = {"max_new_tokens": 4, "temperature": 0.0, "longest": 10}
    with pytest.raises(RecipeError, match=r"a prompt has 11 tokens; the model reads 10"):
        generate(model, ByteTokenizer(), ["short", "12345678901"], **options)
    texts = ["1234567890", "abcdefghijkl"]
    cut = generate(model, ByteTokenizer(), texts, truncate=True, **options)
    options["longest"] = None
    assert cut == generate(model, ByteTokenizer(), ["1234567890", "ghijkl"], **options)


def test_memory_grows_with_the_length_of_a_prompt_and_not_with_its_square(model):
    with limited(400, cpu_seconds=60):
        generate(model, ByteTokenizer(), ["a" * 12_000], max_new_tokens=1)


def test_seeds_and_equal_prompts_give_other_samples_and_the_same_seed_the_same(model):
    def sample(seed):
        return generate(model, ByteTokenizer(), ["a", "a"], max_new_tokens=16, seed=seed)

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    assert sample(1)[0] != sample(1)[1]


def test_generation_ends_at_the_end_of_the_document(model):
    class Ends(LanguageModel):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.calls = 0

        def forward(self, tokens, **_):
            self.calls += 1
            logits = torch.full((*tokens.shape, 257), -1e9)
            logits[..., 65 if self.calls < 4 else 256] = 0.0
            return logits

    ends = Ends()
    assert generate(ends, ByteTokenizer(), ["x", "yy"], max_new_tokens=50) == ["AAA", "AAA"]
    assert ends.calls == 4


class SilentEnd(ByteTokenizer):
    """Decoding leaves `!` out, as it does special tokens."""

    def decode(self, ids):
        return super().decode([token for token in ids if token != ord("!")])


def test_generation_ends_at_a_word_also_where_decoding_leaves_it_out():
    def model(tokens, **_):
        """Say `yes! no! ...` whatever the prompt."""
        said.append(None)
        logits = torch.zeros(*tokens.shape, 257)
        logits[..., b"yes! no! "[(len(said) - 1) % 9]] = 1.0
        return logits

    model.parameters = lambda: iter([torch.zeros(1)])
    for tokenizer, words, text, tokens in [
        (ByteTokenizer(), ["! n"], "yes", 6),
        (ByteTokenizer(), ["!", "n"], "yes", 4),
        (SilentEnd(), ["!"], "yes", 4),
        (SilentEnd(), ["no!"], "yes ", 8),
        (SilentEnd(), ["s no"], "ye", 7),
    ]:
        said = []
        found = generate(
            model, tokenizer, ["Sure?"], max_new_tokens=20, temperature=0.0, until=words
        )
        assert (found, len(said)) == ([text], tokens)


def test_top_k_and_top_p_keep_the_likeliest_tokens():
    shares = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    logits = shares.log()
    assert torch.allclose(sampling_probabilities(logits, 1.0, 0, 1.0), shares)
    kept = sampling_probabilities(logits, 1.0, 2, 1.0)
    assert torch.allclose(kept, torch.tensor([[0.625, 0.375, 0.0, 0.0]]))
    kept = sampling_probabilities(logits, 1.0, 0, 0.7)
    assert (kept > 0).tolist() == [[True, True, False, False]]
    assert (sampling_probabilities(logits, 1.0, 0, 0.0) > 0).tolist() == [
        [True, False, False, False]
    ]
    for small in (1e-40, 1e-300):
        assert sampling_probabilities(logits, small, 0, 1.0).tolist() == [[1.0, 0.0, 0.0, 0.0]]
    sharper = sampling_probabilities(logits, 0.5, 0, 1.0)
    assert torch.allclose(sharper, shares.square() / shares.square().sum())
