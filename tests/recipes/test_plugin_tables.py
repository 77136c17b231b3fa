"""A table that a plugin adds to recipes, [plugins.NAME]."""

import pytest

from tests.recipes.test_plugins import explained

TABLE = """\
from typing import Literal

from trainer.plugins import Count, OptimizerConfig, Table, optimizers, register_table


@register_table("shared")
class Shared(Table):
    factor: Count = 2
    \"\"\"what the rate is multiplied by\"\"\"


@optimizers.register
class Scaled(OptimizerConfig):
    name: Literal["scaled"] = "scaled"
    shared: Shared = Shared()

    def build(self, groups, device):
        import torch

        print(f"factor {self.shared.factor}")
        return torch.optim.SGD(groups, lr=self.lr * self.shared.factor)
"""
WITH_TABLE = """\
[run]
steps = 2
[optimizer]
name = "scaled"
[schedule]
name = "constant"
[model]
dim = 32
n_layers = 1
[data]
seq_len = 32
[[data.sources]]
name = "synthetic"
[plugins]
modules = ["with_table"]
[plugins.shared]
factor = 3
"""


@pytest.fixture
def table_plugin(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "with_table.py").write_text(TABLE)


@pytest.mark.usefixtures("table_plugin")
def test_a_plugin_s_table_is_checked_once_and_explained(command):
    found = explained(command("explain", "recipe.toml", "--json", recipe=WITH_TABLE))
    assert found["plugins.shared.factor"] == found["optimizer.shared.factor"] == 3
    text = WITH_TABLE.replace("factor = 3", "factor = 0\nfaktor = 1\n[plugins.sahred]")
    done = command("validate", "recipe.toml", recipe=text)
    assert done.returncode == 2
    assert done.stderr == (
        "error: recipe.toml:17:1: plugins.shared.factor: expected at least 1, got 0\n"
        'error: recipe.toml:18:1: plugins.shared.faktor: unknown key "faktor"; '
        'did you mean "factor"?\n'
        'error: recipe.toml:19:10: plugins.sahred: unknown key "sahred"; did you mean "shared"?\n'
    )
    without = WITH_TABLE.partition("[plugins.shared]")[0]
    assert (
        explained(command("explain", "recipe.toml", "--json", recipe=without))[
            "optimizer.shared.factor"
        ]
        == 2
    )


@pytest.mark.usefixtures("table_plugin")
def test_a_component_reads_its_plugin_s_table_and_a_resumed_run_keeps_it(command):
    run = ("run", "recipe.toml", "--set", "run.dir=runs", "--set", "evaluate.interval=0")
    done = command(*run, "--set", "data.cache_dir=cache", recipe=WITH_TABLE)
    assert done.returncode == 0, done.stderr
    assert "factor 3" in done.stdout
    changed = command(*run, "--set", "run.steps=4", "--set", "plugins.shared.factor=4")
    assert changed.returncode == 2
    assert "plugins.shared.factor: is 4, and 3 in the checkpoint" in changed.stderr
