"""`trainer launch kubernetes` writes a JobSet that the API's own schema accepts."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.commands import run_in_process
from trainer.engine.launch.environment import find_world
from trainer.engine.launch.kubernetes import resource_name

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = json.loads((Path(__file__).parent / "jobset_v1alpha2.json").read_text())
RECIPE = """\
[run]
steps = 4
name = "Big_Run.1"
[model]
n_layers = 2
[data]
seq_len = 64
global_batch = 32
[[data.sources]]
name = "synthetic"
"""


def strict(schema):
    """Return a schema that refuses fields it does not know, as `kubectl apply --validate` does."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        found["additionalProperties"] = False
    return found


SCHEMA = strict(PUBLISHED["schema"])


@pytest.fixture
def launch(capsys, tmp_path, monkeypatch):
    """Run `trainer launch kubernetes` in this process; return exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.toml").write_text(RECIPE)

    def launch(*arguments):
        return run_in_process(capsys, "launch", "kubernetes", "r.toml", *arguments)

    return launch


def container_of(manifest):
    (job,) = manifest["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    return container


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--nodes", "4", "--cpus", "32", "--memory", "512Gi", "--namespace", "team"],
        [
            "--nodes",
            "2",
            "--volume",
            "data:/workspace",
            "--volume",
            "runs:/runs",
            "--max-restarts=0",
        ],
    ],
)
def test_the_schema_of_the_api_accepts_the_manifest(launch, words):
    code, out, err = launch("--image", "example/trainer:1", *words)
    assert code == 0, err
    jsonschema.validate(yaml.safe_load(out), SCHEMA)


def test_the_schema_refuses_what_the_api_does_not_know(launch):
    manifest = yaml.safe_load(launch("--image", "i")[1])
    container_of(manifest)["commands"] = ["x"]
    with pytest.raises(jsonschema.ValidationError, match="commands"):
        jsonschema.validate(manifest, SCHEMA)
    container_of(manifest).pop("commands")
    manifest["spec"]["failurePolicy"]["maxRestarts"] = "many"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest, SCHEMA)


def test_pods_run_torchrun_and_find_the_first_one(launch):
    code, out, err = launch(
        "--image", "i", "--nodes", "4", "--gpus-per-node", "2", "--set", "run.seed=1"
    )
    assert code == 0, err
    manifest = yaml.safe_load(out)
    (job,) = manifest["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert (spec["parallelism"], spec["completions"], spec["completionMode"]) == (4, 4, "Indexed")
    container = container_of(manifest)
    name = manifest["metadata"]["name"]
    # JobSet names pods JOBSET-JOB-REPLICA-INDEX, below a service with the name of the JobSet.
    assert f"--master-addr={name}-{job['name']}-0-0.{name}" in container["command"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert container["command"][-3:] == ["run", "r.toml", "--set=run.seed=1"]
    (variable,) = container["env"]
    assert "$(NODE_RANK)" in " ".join(container["command"])
    assert variable["name"] == "NODE_RANK"
    from torch.distributed.run import get_args_parser

    words = [word.replace("$(NODE_RANK)", "3") for word in container["command"][1:]]
    parsed = get_args_parser().parse_args(words)
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.node_rank) == ("4", "2", 3)
    assert parsed.training_script == "trainer"


def test_the_command_of_a_pod_starts_ranks(launch, tmp_path):
    """The command of a single pod is run, with a program that says what it finds as `trainer`."""
    command = container_of(yaml.safe_load(launch("--image", "i", "--gpus-per-node", "2")[1]))[
        "command"
    ]
    (tmp_path / "trainer").write_text(
        f"#!{sys.executable} -P\nimport os, sys\nfrom pathlib import Path\n"
        'text = os.environ["WORLD_SIZE"] + " ".join(sys.argv)\n'
        'Path("rank" + os.environ["RANK"]).write_text(text)\n'
    )
    (tmp_path / "trainer").chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PATH": path}, timeout=120, check=True)
    for rank in range(2):
        assert (tmp_path / f"rank{rank}").read_text().startswith("2")
        assert (tmp_path / f"rank{rank}").read_text().endswith("run r.toml")


def test_what_kubernetes_would_replace_in_a_setting_is_escaped(launch):
    out = launch("--image", "i", "--set", "data.cache_dir=$(HOME)/$$x")[1]
    # In the API's words "$$" is a "$", and "$(NAME)" a variable.
    assert "--set=data.cache_dir=$$(HOME)/$$$$x" in container_of(yaml.safe_load(out))["command"]


def test_characters_beyond_16_bits_are_no_halves(launch):
    out = launch("--image", "i", "--set", "data.cache_dir=\U0001f600")[1]
    assert "\\u" not in out
    assert "--set=data.cache_dir=\U0001f600" in container_of(yaml.safe_load(out))["command"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--volume", "data"], "--volume"),
        (["--volume", "data_1:/data"], "no name in Kubernetes"),
        (["--volume", "a:/data", "--volume", "b:/data/"], "each path once"),
        (["--volume", "a:/dev/shm"], "each path once"),
        (["--namespace", "Team"], "no name in Kubernetes"),
        (["--image", ""], "--image"),
        (["--workdir", "work"], "--workdir"),
        (["--memory", "lots"], "--memory"),
        (["--nodes", "3", "--gpus-per-node", "7"], "global_batch"),
        (["--set", "run.resume=never"], "run.resume"),
    ],
)
def test_bad_input_is_refused(launch, words, text):
    code, _, err = launch("--image", "i", *words)
    assert code == 2
    assert text in err
    assert "Traceback" not in err


def test_names_are_those_of_kubernetes():
    label = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
    for text in ("Big_Run.1", "3b", "-", "x" * 90, "ünï"):
        assert label.fullmatch(resource_name(text) + "-ranks-0-0"), text
    assert resource_name("Big_Run.1") == "big-run-1"


def test_the_ports_of_a_pod_are_what_ranks_read():
    environ = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    world = find_world({**environ, "MASTER_ADDR": "big-ranks-0-0.big", "MASTER_PORT": "29400"})
    assert world.rendezvous == "tcp://big-ranks-0-0.big:29400"


@pytest.mark.matrix
@pytest.mark.timeout(1500)
def test_the_commands_of_the_dockerfile_make_an_environment(tmp_path):
    """No image is built here: each RUN line is executed, with folders of the test's own."""
    source = tmp_path / "source"
    left_out = shutil.ignore_patterns(*(ROOT / ".dockerignore").read_text().split())
    shutil.copytree(ROOT, source, symlinks=True, ignore=left_out)
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    commands = [line.removeprefix("RUN ") for line in lines if line.startswith("RUN ")]
    environ = {
        key: os.environ[key] for key in os.environ if key not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    environ |= {"SOURCE": str(source), "VENV": str(tmp_path / "venv")}
    assert len(commands) == 4
    for command in commands:
        done = subprocess.run(
            ["sh", "-c", command], env=environ, cwd="/", capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
    assert done.stdout.startswith("trainer ")
    (tmp_path / "r.toml").write_text(RECIPE)
    done = subprocess.run(
        [tmp_path / "venv/bin/trainer", "validate", "r.toml"],
        cwd=tmp_path, env=environ, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
