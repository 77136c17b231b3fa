"""The shipped recipe for conversations: its data, and that it learns to answer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import trainer
from trainer.engine.recipe.load import load_recipe
from trainer.engine.sources.chat import ChatSource
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer
from trainer.engine.tokenizers.tokenizer import MaskedDocument

RECIPE = Path(trainer.__file__).parent.resolve() / "recipes" / "chat_debug.toml"


def test_its_conversations_are_all_read_and_fit_a_row() -> None:
    table = load_recipe(RECIPE).recipe.data
    (source,) = table.sources
    assert isinstance(source, ChatSource)
    documents = list(source.for_tokenizer(ByteTokenizer()).documents())
    lines = [json.loads(line) for line in Path(source.path).read_text().splitlines()]
    assert len(documents) == len(lines) > 100
    for document, line in zip(documents, lines, strict=True):
        assert isinstance(document, MaskedDocument)
        answers = [each["content"] for each in line["messages"] if each["role"] == "assistant"]
        learned = [document.text[start:stop] for start, stop in document.loss_ranges]
        assert learned == [f"{answer}<|im_end|>\n" for answer in answers]
    longest = max(
        len(document.text) for document in documents if isinstance(document, MaskedDocument)
    )
    assert longest < 2 * table.seq_len


@pytest.mark.matrix
@pytest.mark.slow
def test_it_learns_and_answers(tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, "-P", "-m", "trainer", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
            capture_output=True, text=True, check=False, timeout=280,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("run", str(RECIPE), "--set", "run.steps=120", "--set", "checkpoint.interval=120")
    rows = (tmp_path / "runs/chat-debug/metrics.jsonl").read_text().splitlines()
    losses = [row["loss"] for row in map(json.loads, rows) if row["kind"] == "train"]
    assert losses[-1] < 0.4 * losses[0]
    chat = ["--chat", "chatml", "--prompt", "Spell cat.", "--max-new-tokens", "60"]
    answer = run("generate", "runs/chat-debug", *chat, "--temperature", "0")
    assert answer.strip()
    assert "<|im_end|>" not in answer
    assert len(answer.rstrip()) < 50  # it came to an end before the limit did
