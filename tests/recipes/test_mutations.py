"""Two thousand damaged recipes: each is refused at a place, or still valid; none is a traceback."""

import contextlib
import io
import os
import random
import re
from pathlib import Path

import pytest
import tomli

from tests.cases import also
from tests.commands import run_trainer
from trainer.cli.main import main

MAIN = """\
# a recipe that uses most of what there is
extends = ["base.toml", "sub/mid.toml"]

[run]
name = "mutated"
steps = 200
seed = 7

[model]
flavor = "debug"
n_layers = 2
rope_scaling = { factor = 4.0, original_max_seq_len = 128 }

[data]
seq_len = 128
global_batch = 16
packing = "documents"
[[data.sources]]
name = "python"
weight = 2.5
[[data.sources]]
name = "jsonl"
path = "corpus/*.jsonl"
field = "body"

[optimizer]
lr = 3e-4
betas = [0.9, 0.95]
[[optimizer.groups]]
match = "re:.*norm\\\\.weight"
weight_decay = 0.0

[parallel.fsdp]
strategy = "shard_grad_op"

[plugins]
modules = []
"""
BASE = """\
[tokenizer]
name = "bytes"
[schedule]
name = "cosine"
warmup_steps = 20
min_lr_ratio = 0.1
[kernels]
attention = "sdpa"
"""
MID = """\
extends = ["../base.toml"]
[checkpoint]
interval = 50
keep = 3
[metrics]
trackers = [{ name = "tensorboard" }]
[resilience]
non_finite = "skip"
stop_timeout_seconds = 30.5
"""
VALUES = [
    "0", "-1", "3", "99999999999", "9223372036854775807", "9223372036854775808", "1" * 400,
    "-" + "9" * 5000, "0x" + "f" * 40, "1e400", "-1e-400", "nan", "-inf", "0.0", "true", "false",
    '""', '"x"', '"../../etc/passwd"', '"/dev/zero"', '"\\u0000"', '"\\u001b[2J"', "'\u202e'",
    '"' + "y" * 3000 + '"', "[]", "[[[]]]", "[1, 'a', {}]", "{}", "{ a = { b = 1 } }",
    "[" * 60 + "]" * 60, "[" * 3000, "1979-05-27", "07:32:00", "1979-05-27T07:32:00Z", "bare",
    "True", "None", "'''", '"\\ud800"', "[{name = 'text'}]", "{ name = 3 }", '"re:("', '"auto"',
    '["base.toml"]', '["missing.toml"]', '["main.toml"]', '["folder.toml"]', '["fifo.toml"]',
]  # fmt: skip
KEYS = ["name", "steps", "lr", "x", "seq_len", "extends", "a.b.c", "'q r'", '"\\u0007"', "run", "é"]
OVERRIDES = [
    "run.steps", "data.sources.0.weight", "data.sources.9.name", "optimizer.betas.1", "model",
    "data.sources.0", "a.b.c.d", "run.steps.x", "extends", "optimizer.groups.0.match", "...", "",
]  # fmt: skip


def mutate(text, generator):
    """Return the text with one thing changed."""
    lines = text.splitlines()
    index = generator.randrange(len(lines))
    line = lines[index]
    at = generator.randrange(len(text))
    kind = generator.randrange(12)
    if kind == 0:  # a typo in a key, a table or a value
        spot = generator.randrange(len(line) + 1)
        wrong = generator.choice(["", "x", "_", line[spot : spot + 1] * 2])
        lines[index] = line[:spot] + wrong + line[spot + 1 :]
    elif kind <= 3 and "=" in line:  # another value
        lines[index] = f"{line.partition('=')[0]}= {generator.choice(VALUES)}"
    elif kind == 4 and "=" in line:  # another key
        lines[index] = f"{generator.choice(KEYS)} ={line.partition('=')[2]}"
    elif kind == 5:
        del lines[index]
    elif kind == 6:
        lines.insert(generator.randrange(len(lines) + 1), line)
    elif kind == 7:  # a stray character, control characters among them
        odd = generator.choice([*map(chr, range(32)), "\x7f", "\u2028", "\ufeff", '"', "[", "é"])
        return text[:at] + odd + text[at:]
    elif kind == 8:
        return text[:at]
    elif kind == 9:  # a new line somewhere
        new = generator.choice([f"{generator.choice(KEYS)} = {generator.choice(VALUES)}", "[[x]]"])
        lines.insert(index, new)
    elif kind == 10:  # deep
        lines.insert(index, generator.choice(["[", ""]) + ".".join("k" * generator.randrange(2000)))
    else:
        other = generator.randrange(len(lines))
        lines[index], lines[other] = lines[other], line
    return "\n".join(lines) + "\n"


def damage(data, generator):
    """Return the bytes with some of them random."""
    at = generator.randrange(len(data))
    junk = generator.randbytes(generator.choice([1, 3, 40]))
    return data[:at] + junk + data[at + generator.choice([0, len(junk)]) :]


def write_case(folder, seed):
    """Write the seed's recipes into `folder` and return the command line."""
    generator = random.Random(seed)
    texts = {"main.toml": MAIN, "base.toml": BASE, "sub/mid.toml": MID}
    for _ in range(generator.choice([1, 1, 2, 3])):
        name = generator.choice(["main.toml", "main.toml", "base.toml", "sub/mid.toml"])
        texts[name] = mutate(texts[name] or "#", generator)
    for name, text in texts.items():
        data = text.encode("utf-8", "surrogatepass")
        if data and generator.random() < 0.05:
            data = damage(data, generator)
        (folder / name).write_bytes(data)
    arguments = ["validate", "main.toml"]
    if generator.random() < 0.25:
        key, value = generator.choice(OVERRIDES), generator.choice(VALUES)
        arguments += ["--set", generator.choice([f"{key}={value}", key, value])]
    return arguments


def check(arguments, code, out, err, folder):
    """Compare an outcome with the contract; return whether the recipe was refused."""
    assert "Traceback" not in err
    if code == 0:
        assert out == "main.toml: valid\n"
        for line in err.splitlines():  # a damaged path may lead nowhere
            assert re.fullmatch(r"warning: main\.toml.*: .* does not exist on this machine", line)
        tomli.loads((folder / "main.toml").read_text("utf-8-sig"))
        return False
    assert code == 2, (arguments, err)
    assert err
    for line in err.splitlines():
        assert line.isprintable()
        assert len(line) < 600
        place = re.match(r"error: (?:(\S+\.toml):(\d+):(\d+): .+|--set: .+|and \d+ more)", line)
        assert place, line
        if place[1]:
            lines = (folder / place[1]).read_bytes().split(b"\n")
            assert 1 <= int(place[2]) <= len(lines)
            assert 1 <= int(place[3]) <= len(lines[int(place[2]) - 1]) + 2
    return True


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    (tmp_path / "folder.toml").mkdir()
    os.mkfifo(tmp_path / "fifo.toml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("part", [0, 1, 2, *also(*range(3, 20))])
def test_a_damaged_recipe_is_refused_at_a_place_or_still_valid(folder, part):
    refused = 0
    for seed in range(100 * part, 100 * part + 100):
        arguments = write_case(folder, seed)
        out, err = io.StringIO(), io.StringIO()
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as stop,
        ):
            main(arguments)
        refused += check(arguments, stop.value.code, out.getvalue(), err.getvalue(), folder)
    assert 50 < refused < 100


@pytest.mark.parametrize("seed", [5000, 5001, *also(*range(5002, 5010))])
def test_the_command_itself_refuses_damaged_recipes(folder, seed):
    arguments = write_case(folder, seed)
    done = run_trainer(*arguments, folder=Path.cwd())
    check(arguments, done.returncode, done.stdout, done.stderr, folder)


def test_the_recipe_is_valid_before_it_is_damaged(folder, capsys):
    for name, text in {"main.toml": MAIN, "base.toml": BASE, "sub/mid.toml": MID}.items():
        (folder / name).write_text(text)
    with pytest.raises(SystemExit) as stop:
        main(["validate", "main.toml"])
    assert (stop.value.code, capsys.readouterr().out) == (0, "main.toml: valid\n")
