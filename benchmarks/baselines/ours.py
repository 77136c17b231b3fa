"""This trainer: a recipe through `engine.run.run`, with everything that a run does each step.

Only numbers as tokens are registered on top, as a plugin would do it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
from turns import Turn
from workload import Workload, baseline_arguments

from trainer.engine.corpus.store import TokenStore
from trainer.engine.launch.environment import World
from trainer.engine.observe.observer import Observer
from trainer.engine.recipe.load import load_recipe
from trainer.engine.run.run import run
from trainer.engine.sources.configs import SourceConfig, sources
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer
from trainer.engine.tokenizers.configs import TokenizerConfig, tokenizers


@tokenizers.register
class NumbersTokenizer(TokenizerConfig):
    """Ids without text."""

    name: Literal["numbers"] = "numbers"
    vocab_size: int

    def build(self) -> Any:
        tokenizer = ByteTokenizer()
        tokenizer.vocab_size, tokenizer.eos_id = self.vocab_size, self.vocab_size - 1
        tokenizer.fingerprint = f"numbers {self.vocab_size}"
        return tokenizer


@sources.register
class FlatSource(SourceConfig):
    """A flat uint16 file as one document."""

    name: Literal["flat"] = "flat"
    path: str

    def open(self, tokenizer: Any, cache: Path) -> TokenStore:
        tokens = np.memmap(self.path, dtype=np.uint16, mode="r").view(np.ndarray)
        offsets = np.array([0, len(tokens)])
        return TokenStore(tokens, offsets, tokenizer.eos_id, fingerprint=self.path)


RECIPE = """
[run]
steps = {steps}

[model]
name = "llama3"
flavor = "debug"
dim = {dim}
n_layers = {layers}
n_heads = {heads}
n_kv_heads = {kv_heads}
ffn_dim = {ffn}
norm_eps = {norm_eps}
rope_theta = {rope_theta}
tie_embeddings = false

[tokenizer]
name = "numbers"
vocab_size = {vocab}

[data]
seq_len = {seq_len}
global_batch = {batch}
micro_batch = {batch}
shuffle = false
validation_fraction = 0.0
sources = [{{ name = "flat", path = "{tokens}" }}]

[optimizer]
name = "adamw"
lr = {lr}
weight_decay = {weight_decay}
betas = {betas}
eps = {eps}
clip_norm = {clip_norm}

[schedule]
name = "constant"

[checkpoint]
interval = 0

[evaluate]
interval = 0
"""


def main() -> None:
    parser = baseline_arguments(__doc__)
    parser.add_argument("--compute", help="default: the recipe's")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--set", action="append", default=[], help="change the recipe further")
    options = parser.parse_args()
    load = Workload(options.vocab, options.tokens)
    values = {**vars(load), "betas": list(load.betas), "steps": load.max_steps}
    recipe = Path("ours.toml")
    recipe.write_text(RECIPE.format(**values))
    overrides = [*options.set, *["compile.enabled=true"] * options.compile]
    if options.compute:
        overrides.append(f"precision.compute={options.compute}")
    take_turns(Turn())
    run(load_recipe(recipe, overrides).recipe, World())


def take_turns(turn: Turn) -> None:
    """End a turn where the loop has finished a step."""
    on_step = Observer.on_step

    def observed(self: Observer, *step: Any) -> None:
        on_step(self, *step)
        turn.step_done()

    Observer.on_step = observed  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
