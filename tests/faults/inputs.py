"""Small inputs of every kind, the commands that read each, and ways to damage a file."""

import contextlib
import io
import json
import random

import pytest

from trainer.cli.main import main

RECIPE = """
[run]
steps = 3
[model]
dim = 32
n_layers = 1
n_heads = 2
n_kv_heads = 1
ffn_dim = 64
[data]
seq_len = 32
global_batch = 4
[[data.sources]]
name = "jsonl"
path = "texts.jsonl"
[checkpoint]
interval = 2
[metrics]
interval = 1
[evaluate]
interval = 2
steps = 1
[precision]
compute = "fp32"
"""
FORESEEN = (0, 2, 3, 4, 5)
CHECKPOINT = "runs/tiny/checkpoints/step-00000003"

# What is damaged, and what reads it. {out} is a fresh name.
COMMANDS = {
    "runs/tiny/recipe.toml": ["status runs/tiny", "report runs/tiny --out {out}"],
    "runs/tiny/state.json": ["status runs/tiny", "report runs/tiny --out {out}"],
    "runs/tiny/metrics.jsonl": ["status runs/tiny", "report runs/tiny --out {out}"],
    f"{CHECKPOINT}/manifest.json": [
        "checkpoint verify runs/tiny",
        "checkpoint inspect " + CHECKPOINT,
        "checkpoint list runs/tiny",
        "convert-ckpt dcp2torch runs/tiny {out}.pt",
    ],
    f"{CHECKPOINT}/index.json": ["checkpoint verify runs/tiny", "generate runs/tiny --prompt a"],
    f"{CHECKPOINT}/shard-00000.safetensors": [
        "checkpoint verify runs/tiny",
        "convert-ckpt dcp2hf runs/tiny {out}",
    ],
    "hf/config.json": ["convert-ckpt hf2dcp hf {out}"],
    "hf/model.safetensors": ["convert-ckpt hf2dcp hf {out}"],
    "weights.pt": ["convert-ckpt torch2dcp weights.pt {out} --recipe tiny.toml"],
    "tokens/tokens.json": ["data inspect tokens"],
    "tokens/tokens-00000.bin": ["data inspect tokens"],
    "bpe/tokenizer.json": [
        "data prepare --recipe tiny.toml --tokenizer bpe --tokenizer-path bpe --out {out}"
    ],
    "texts.jsonl": ["evaluate runs/tiny --data texts.jsonl"],
    "chats.jsonl": ["data prepare --recipe chat.toml --out {out}"],
    "texts.parquet": ["evaluate runs/tiny --data texts.parquet"],
}


def invoke(command):
    """Run a command line in this process; return its exit code and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as stop,
    ):
        main(command.split())
    return stop.value.code, out.getvalue(), err.getvalue()


def make_inputs(folder):
    """Fill the working directory `folder` with inputs that are whole."""
    (folder / "tiny.toml").write_text(RECIPE)
    lines = [json.dumps({"text": f"the words of document {n} " * 4}) for n in range(40)]
    (folder / "texts.jsonl").write_text("\n".join(lines) + "\n")
    turns = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]
    (folder / "chats.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 20)
    chat = 'name = "chat"\npath = "chats.jsonl"\ntemplate = "chatml"\n'
    texts = 'name = "jsonl"\npath = "texts.jsonl"\n'
    packed = RECIPE.replace(texts, chat).replace("[data]", '[data]\npacking = "documents"')
    (folder / "chat.toml").write_text(packed)
    write_parquet(folder / "texts.parquet")
    for command in (
        "run tiny.toml",
        "convert-ckpt dcp2hf runs/tiny hf",
        "convert-ckpt dcp2torch runs/tiny weights.pt",
        "data train-tokenizer tiny.toml --vocab-size 270 --out bpe",
        "data prepare --recipe tiny.toml --out tokens",
    ):
        code, out, err = invoke(command)
        assert code == 0, (command, out, err)


def write_parquet(path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"the words of document {n} " * 4 for n in range(40)]
    parquet.write_table(pyarrow.table({"text": texts}), path)


def flip(data, dice):
    """Return the bytes with one bit changed."""
    changed = bytearray(data)
    changed[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def mutate(data, dice):
    """Return the bytes with something changed, cut, repeated or put in."""
    at, length = dice.randrange(len(data)), dice.choice([1, 3, 40, 4096])
    odd = [b'"', b"{", b"[" * 3000, b"9" * 400, b"-1", b"null", b"\xff\xfe", b"\x00", b"\x1b[2J"]
    kind = dice.randrange(7)
    if kind == 0:
        return flip(data, dice)
    if kind == 1:
        return data[:at]
    if kind == 2:
        return data[:at] + data[at + length :]
    if kind == 3:
        return data[: at + length] + data[at:]
    if kind == 4:
        return data[:at] + bytes(length) + data[at + length :]
    if kind == 5:
        return data[:at] + dice.randbytes(length) + data[at + length :]
    return data[:at] + dice.choice(odd) + data[at + dice.choice([0, 1]) :]


def swap_value(data, dice):
    """Return JSON with one value replaced; other bytes as `mutate` changes them."""
    try:
        tree = json.loads(data)
    except ValueError:
        return mutate(data, dice)
    values = [None, True, -1, 0, 2**70, 1e308, "", "\x1b[31m", "../../x", [], {}, [[[]]], "é" * 999]
    spot, key = tree, None
    while isinstance(spot, dict | list) and spot:
        holder, key = spot, dice.choice(list(spot) if isinstance(spot, dict) else range(len(spot)))
        spot = holder[key]
        if dice.random() < 0.3:
            break
    if key is None:
        return mutate(data, dice)
    holder[key] = dice.choice(values)
    return json.dumps(tree).encode()


def damage(path, seed):
    """Change a file by one of the ways above."""
    dice = random.Random(seed)
    data = path.read_bytes()
    way = swap_value if path.suffix == ".json" and dice.random() < 0.5 else mutate
    path.write_bytes(way(data, dice))


def assert_foreseen(command, code, out, err):
    """Check that a command ended as the contract says, and printed nothing that acts."""
    assert code in FORESEEN, (command, code, err)
    assert "Traceback" not in err, (command, err)
    printed = err if command.startswith("generate") else out + err  # a sample may be anything
    for line in printed.splitlines():
        assert line.isprintable(), (command, line)
