"""`extends` and `--set`: what wins, and who is named as its origin."""

import os

import pytest

from trainer.engine.core.errors import RecipeError
from trainer.engine.optim.tables import optimizers
from trainer.engine.recipe.load import load_recipe
from trainer.engine.recipe.write import explain


def origins(loaded):
    return {each.key: each.origin for each in explain(loaded)}


def test_later_files_win_tables_merge_and_arrays_replace(write, load):
    write("a.toml", "[optimizer]\nlr = 1.0\neps = 1e-6\nbetas = [0.1, 0.2]\n[run]\nsteps = 1\n")
    write("b.toml", '[optimizer]\nlr = 2.0\n[[data.sources]]\nname = "synthetic"\nseed = 4\n')
    loaded = load(
        'extends = ["a.toml", "b.toml"]\n[optimizer]\nbetas = [0.5, 0.6]\n'
        '[[data.sources]]\nname = "synthetic"\n'
    )
    optimizer = loaded.recipe.optimizer
    assert (optimizer.lr, optimizer.eps, optimizer.betas) == (2.0, 1e-6, (0.5, 0.6))
    assert [source.seed for source in loaded.recipe.data.sources] == [0]
    found = origins(loaded)
    assert found["optimizer.lr"] == "b.toml:2"
    assert found["optimizer.eps"] == "a.toml:3"
    assert found["optimizer.betas"] == "recipe.toml:3"
    assert found["data.sources.0.seed"] == "default"
    assert found["run.name"] == "the file's name"


def test_what_a_base_extends_is_laid_below_it(write, load):
    write("deep/base.toml", 'extends = ["../deepest.toml"]\n[run]\nseed = 2\n')
    write("deepest.toml", "[run]\nseed = 1\nsteps = 7\n")
    loaded = load('extends = ["deep/base.toml"]')
    assert (loaded.recipe.run.seed, loaded.recipe.run.steps) == (2, 7)
    assert origins(loaded)["run.steps"] == "deep/../deepest.toml:3"


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("run.steps=5", "run.steps", 5),
        ("optimizer.lr = 1e-2", "optimizer.lr", 0.01),
        ("run.dir=out/runs", "run.dir", "out/runs"),
        ('run.dir="a b"', "run.dir", "a b"),
        ("run.dir=", "run.dir", ""),
        ("optimizer.betas=[0.5, 0.75]", "optimizer.betas", (0.5, 0.75)),
        ("compile.enabled=true", "compile.enabled", True),
        ("data.sources.0.weight=2", "data.sources.0.weight", 2.0),
        ('data={seq_len=32, shuffle=false}', "data.seq_len", 32),
        ("data.sources.1.name=synthetic", "data.sources.1.name", "synthetic"),
    ],
)  # fmt: skip
def test_set_is_typed_and_reaches_into_lists(load, override, key, value):
    found = {each.key: each for each in explain(load("[run]\nsteps = 1\n", override))}
    assert found[key].value == value
    assert found[key].origin == "--set"


def test_set_merges_tables_and_the_last_one_wins(load):
    recipe = load("[run]\nsteps = 1\n", "run={seed=3}", "run.steps=4", "run.steps=5").recipe
    assert (recipe.run.seed, recipe.run.steps) == (3, 5)


def test_set_changes_one_entry_of_a_list_from_a_file(load):
    text = (
        '[run]\nsteps = 1\n[[data.sources]]\nname = "synthetic"\n[optimizer]\nbetas = [0.5, 0.6]\n'
    )
    loaded = load(text, "data.sources.0.seed=9", "optimizer.betas.1=0.7")
    assert loaded.recipe.data.sources[0].seed == 9
    assert loaded.recipe.optimizer.betas == (0.5, 0.7)
    assert origins(loaded)["data.sources.0.name"] == "recipe.toml:4"
    assert origins(loaded)["data.sources.0.seed"] == "--set"
    assert origins(loaded)["optimizer.betas"] == "--set"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "expected KEY=VALUE"),
        ("=3", "expected KEY=VALUE"),
        ("run..steps=3", "expected KEY=VALUE"),
        ('extends=["x.toml"]', "this key cannot be set"),
        (".".join("a" * 40) + "=1", "this key cannot be set"),
        ("run.steps=[1", "is not TOML"),
        ("run.steps=" + "[" * 1000, "nested too deep"),
        ("run.steps=" + "1" * 5000, "too long"),
        ("run.steps=1" + "0" * 30, "64 bits"),
        ("run.steps=1\nx = 2", "expected one value"),
        ('run.dir="\\u0000"', "U+0000"),
        (os.fsdecode(b"run.dir=\xff"), "text must be UTF-8"),
        ("run.steps.x=3", "expected a table, but run.steps is 1"),
        ("data.sources.2.name=text", "expected the number of an entry (0 to 0)"),
        ("data.sources.x.name=text", "expected the number of an entry (0 to 0)"),
        ("data.sources.-1.name=text", "expected the number of an entry (0 to 0)"),
        ("run.stepz=3", 'unknown key "stepz"'),
        ("data.sources.0=3", "expected a table, got 3"),
    ],
)
def test_a_wrong_set_is_located(problems, override, message):
    text = "[run]\nsteps = 1\n[data]\nsources = []\n"
    found = problems(text, override)
    assert any(message in each.message and each.file == "--set" for each in found), found


def test_relative_paths_start_at_the_file_that_wrote_them(write, load, tmp_path):
    write("base/base.toml", '[run]\nsteps = 1\n[tokenizer]\nname = "hf"\npath = "tok"\n')
    text = 'extends = ["base/base.toml"]\n[[data.sources]]\nname = "text"\npath = "../x/*.txt"\n'
    loaded = load(text, "run.init_from=weights")
    assert loaded.recipe.tokenizer.path == str(tmp_path / "base/tok")
    assert loaded.recipe.data.sources[0].path == str(tmp_path.parent / "x/*.txt")
    assert loaded.recipe.run.init_from == str(tmp_path / "weights")
    assert loaded.recipe.run.dir == "runs"
    (tmp_path / "elsewhere").mkdir()
    os.chdir(tmp_path / "elsewhere")
    again = load_recipe("../recipe.toml", ["run.init_from=weights"]).recipe
    assert again.data.sources[0].path == loaded.recipe.data.sources[0].path
    assert again.run.init_from == str(tmp_path / "elsewhere/weights")


def test_absolute_and_home_paths_are_kept(load, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    text = '[run]\nsteps = 1\n[tokenizer]\nname = "hf"\npath = "/a/b"\n'
    assert load(text).recipe.tokenizer.path == "/a/b"
    assert load(text, "tokenizer.path=~/t").recipe.tokenizer.path == "/home/someone/t"


def test_the_home_of_nobody_is_a_plain_name(load, tmp_path):
    loaded = load("[run]\nsteps = 1\n", "run.init_from=~no-such-user/x")
    assert loaded.recipe.run.init_from == str(tmp_path / "~no-such-user/x")


def test_naming_another_component_leaves_the_keys_of_the_old_one_behind(write, load, problems):
    write("base.toml", "[run]\nsteps = 1\n[optimizer]\nbetas = [0.8, 0.9]\nlr = 0.5\n")
    optimizer = load('extends = ["base.toml"]\n[optimizer]\nname = "sgd"\n').recipe.optimizer
    assert (optimizer.name, optimizer.lr) == ("sgd", 0.5)
    assert load('extends = ["base.toml"]', "optimizer.name=sgd").recipe.optimizer.name == "sgd"
    write("base.toml", "[run]\nsteps = 1\n[optimizer]\nbetaz = [0.8, 0.9]\n")
    found = problems('extends = ["base.toml"]\n[optimizer]\nname = "sgd"\n')
    assert [(each.file, each.line) for each in found] == [("base.toml", 4)]


def test_the_same_layer_may_not_mix_components(problems):
    found = problems('[run]\nsteps = 1\n[optimizer]\nname = "sgd"\nbetas = [0.8, 0.9]\n')
    assert found[0].key == "optimizer.betas"
    *names, last = optimizers.owners("betas")
    assert {"adamw", "adopt", "torch.RAdam"} <= {*names, last}
    assert "sgd" not in names
    assert found[0].hint == f"only {', '.join(names)} and {last} of the optimizers have it"


def test_circles_are_named_at_the_entry_that_closes_them(write, problems):
    write("a.toml", 'extends = ["b.toml"]\n')
    write("b.toml", '# b\nextends = ["sub/../a.toml"]\n')
    write("sub/x", "")
    [problem] = problems('extends = ["a.toml"]\n')
    assert (problem.file, problem.line, problem.column) == ("b.toml", 2, 12)
    assert problem.message == "extends in a circle: a.toml -> b.toml -> a.toml"


def test_a_file_may_be_extended_twice_along_different_ways(write, load):
    write("a.toml", "[run]\nsteps = 1\n")
    write("b.toml", 'extends = ["a.toml"]\n')
    assert load('extends = ["a.toml", "b.toml"]').recipe.run.steps == 1


def test_endless_extending_is_refused(write, problems):
    for index in range(20):
        write(f"d{index}.toml", f'extends = ["d{index + 1}.toml"]\n')
    write("d20.toml", "")
    assert problems('extends = ["d0.toml"]')[0].message == "extends deeper than 16 files"
    for index in range(10):
        write(f"w{index}.toml", f'extends = ["w{index + 1}.toml", "w{index + 1}.toml"]\n')
    write("w10.toml", "")
    found = problems('extends = ["w0.toml"]')
    assert {each.message for each in found} == {"extends more than 64 files in all"}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('["nosuch.toml"]', "nosuch.toml there is no such file"),
        ('["/etc/passwd"]', 'expected the path of a .toml file, got "/etc/passwd"'),
        ("[3]", "expected the path of a .toml file, got 3"),
        ('"base.toml"', ""),
        ("{}", "expected the path of a .toml file, got a table"),
        ('["folder.toml"]', "folder.toml is not a regular file"),
        ('["fifo.toml"]', "fifo.toml is not a regular file"),
        ('["device.toml"]', "device.toml is not a regular file"),
        ('["huge.toml"]', "huge.toml is larger than a recipe may be (1,000,000 bytes)"),
    ],
)
def test_what_cannot_be_extended_is_said_at_the_entry(write, problems, tmp_path, entry, message):
    (tmp_path / "folder.toml").mkdir()
    os.mkfifo(tmp_path / "fifo.toml")
    (tmp_path / "device.toml").symlink_to("/dev/zero")
    write("huge.toml", "#" * 1_000_001)
    write("base.toml", "[run]\nsteps = 1\nseed = -1\n")
    [problem] = problems(f"# one\nextends = {entry}\n")
    if not message:
        assert problem.file == "base.toml"
        return
    assert (problem.file, problem.line) == ("recipe.toml", 2)
    assert problem.message == message


def test_faults_of_all_files_are_reported_at_once(write, problems):
    write("a.toml", "x = \n")
    write("b.toml", "[run\n")
    found = problems('extends = ["a.toml", "b.toml", 3, "c.toml"]\n')
    assert {each.file for each in found} == {"a.toml", "b.toml", "recipe.toml"}
    assert len(found) == 4


def test_a_missing_recipe_is_named_with_its_nearest_neighbour(write, tmp_path):
    write("llama3_1b.toml", "")
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "llama31b.toml")
    assert caught.value.problems[0].hint == f'did you mean "{tmp_path}/llama3_1b.toml"?'
