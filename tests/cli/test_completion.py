"""What a shell gets when it asks for the rest of a word, as the scripts of Typer ask."""

import os
import subprocess
import sys

import pytest


def complete(words, **environ):
    """Return the completions of the last word, as bash gets them."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "trainer"],
        env={
            **os.environ,
            "_TRAINER_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(words),
            "COMP_CWORD": str(len(words) - 1),
            **environ,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "torch" not in done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("trainer check", ["check-plan", "checkpoint"]),
        ("trainer list opt", ["optimizer"]),
        ("trainer list schedule co", ["constant", "cosine"]),
        ("trainer list recipe quick", ["quickstart"]),
        ("trainer docs optimizer.lr", ["optimizer.lr", "optimizer.lr_decay"]),
        ("trainer docs cosin", ["cosine", "cosine_similarity"]),
        ("trainer docs estimate-m", ["estimate-memory"]),
        ("trainer run x.toml --set checkpoint.keep", ["checkpoint.keep=", "checkpoint.keep_best=",
         "checkpoint.keep_every="]),
        ("trainer run x.toml --set data.sources.0.wei", ["data.sources.0.weight="]),
        ("trainer validate x.toml --set checkpoint.mode=async", ["checkpoint.mode=async",
         "checkpoint.mode=async_pinned"]),
        ("trainer explain x.toml --set compile.enabled=", ["compile.enabled=true",
         "compile.enabled=false"]),
        ("trainer run x.toml --set schedule.name=ws", ["schedule.name=wsd"]),
        ("trainer new x.toml --from llama4", ["llama4_debug"]),
    ],
)  # fmt: skip
def test_a_shell_completes_keys_kinds_components_words_and_recipes(line, expected):
    assert complete(line.split(" ")) == expected


@pytest.mark.parametrize("command", ["plan", "estimate-memory"])
def test_a_shell_completes_gpus(command):
    found = complete(["trainer", command, "x.toml", "--gpu", "h"])
    assert {"h100", "h200"} <= {*found}
