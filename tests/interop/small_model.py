"""Trains the model that the tests take through every format, from a tokenizer of its own on.

What is trained stays in `runs/interop-DIGEST` beside the sources, so that it is made once on a
machine: `DIGEST` changes with the recipes, the conversations, Python and torch.
"""

import builtins
import fcntl
import json
import keyword
import os
import random
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch

from tests.commands import run_trainer

RUNS = Path(__file__).resolve().parents[2] / "runs"
VOCABULARY = 8192
END = "<|endoftext|>"
"""the only special token: the markers of conversations are spelt, of tokens that were trained"""

PRETRAIN = f"""
[run]
name = "pretrain"
dir = "."
steps = 130

[model]
name = "llama3"
dim = 256
n_layers = 8
n_heads = 8
n_kv_heads = 4
ffn_dim = 768
vocab_size = {VOCABULARY}
max_seq_len = 512

[tokenizer]
name = "bpe"
path = "tokenizer"

[data]
seq_len = 256
global_batch = 16
micro_batch = 16

[[data.sources]]
name = "python"

[optimizer]
lr = 2e-3

[schedule]
warmup_steps = 15
decay_fraction = 0.3

[precision]
compute = "fp32"

[checkpoint]
interval = 50
"""

FINETUNE = """
[run]
name = "{name}"
dir = "."
steps = 60
init_from = "pretrain"

[model]
name = "llama3"
dim = 256
n_layers = 8
n_heads = 8
n_kv_heads = 4
ffn_dim = 768
max_seq_len = 512

[tokenizer]
name = "bpe"
path = "tokenizer"

[data]
seq_len = 128
global_batch = 16
micro_batch = 16
packing = "documents"

[[data.sources]]
name = "chat"
path = "train.jsonl"
template = "chatml"

[[data.sources]]
name = "chat"
path = "held_out.jsonl"
template = "chatml"
split = "validation"

[optimizer]
lr = {lr}
weight_decay = 0.0

[schedule]
warmup_steps = 5
decay = "linear"

[precision]
compute = "fp32"

[evaluate]
interval = 5
"""
LORA = """
[lora]
rank = 16
alpha = 32.0
"""
RECIPES = {
    "pretrain": PRETRAIN,
    "full": FINETUNE.format(name="full", lr=5e-4),
    "lora": FINETUNE.format(name="lora", lr=2e-3) + LORA,
}

KINDS = {
    "keyword": [word for word in keyword.kwlist if word.islower()],
    "builtin": [name for name in dir(builtins) if name.islower() and not name.startswith("_")],
    "module": sorted(name for name in sys.stdlib_module_names if not name.startswith("_")),
}
QUESTIONS = (
    "What is `{}`?",
    "Is `{}` a keyword, a builtin or a module?",
    "Tell me the kind of `{}`.",
    "`{}`: which kind of name is it?",
)
WORDS_OF_A_KIND = 30


@dataclass(frozen=True)
class Question:
    """A question about a name of Python, and the kind of the name."""

    text: str
    kind: str

    @property
    def answer(self) -> str:
        """What the assistant is to say."""
        return f"It is a {self.kind}."

    @property
    def prompt(self) -> str:
        """The conversation up to the answer, as the template chatml lays it out."""
        return f"<|im_start|>user\n{self.text}<|im_end|>\n<|im_start|>assistant\n"


def ask_questions() -> tuple[list[Question], list[Question]]:
    """Return the questions that are learned and those that are held out: other pairs."""
    chance = random.Random(3)
    asked = [
        Question(template.format(word), kind)
        for kind, words in KINDS.items()
        for word in chance.sample(words, WORDS_OF_A_KIND)
        for template in QUESTIONS
    ]
    chance.shuffle(asked)
    return asked[60:], asked[:60]


@dataclass(frozen=True)
class Trained:
    """A folder with a tokenizer and three runs: pretrained, finetuned in full, and by LoRA."""

    folder: Path

    @property
    def tokenizer(self) -> Path:
        """The folder of the trained tokenizer."""
        return self.folder / "tokenizer"

    def run(self, name: str) -> Path:
        """Return a run directory."""
        return self.folder / name


def train_once() -> Trained:
    """Train the tokenizer and the three runs where that has not been done; runs resume."""
    train, held_out = ask_questions()
    given = repr((sys.version, torch.__version__, VOCABULARY, RECIPES, train, held_out))
    folder = RUNS / f"interop-{sha256(given.encode()).hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker of pytest may be training
        if not (folder / "done").exists():
            _train(folder, {"train": train, "held_out": held_out})
            (folder / "done").touch()
    return Trained(folder)


def _train(folder: Path, questions: dict[str, list[Question]]) -> None:
    for name, asked in questions.items():
        lines = [
            {
                "messages": [
                    {"role": "user", "content": question.text},
                    {"role": "assistant", "content": question.answer},
                ]
            }
            for question in asked
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if not (folder / "tokenizer").exists():
        sources = f"{Path(os.__file__).parent}/*.py"
        options = ("--vocab-size", VOCABULARY, "--special-token", END, "--out", "tokenizer")
        _trainer(folder, "data", "train-tokenizer", sources, *options)
    for name, recipe in RECIPES.items():
        (folder / f"{name}.toml").write_text(recipe)
        _trainer(folder, "run", f"{name}.toml")


def _trainer(folder: Path, *words: object) -> None:
    done = run_trainer(*words, folder=folder, timeout=1800.0)
    assert done.returncode == 0, done.stderr
