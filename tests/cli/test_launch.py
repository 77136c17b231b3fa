"""What `trainer launch` writes is what SLURM, bash and torchrun understand."""

import os
import shlex
import subprocess
import sys

import pytest
from torch.distributed.run import get_args_parser

from tests.commands import run_in_process

RECIPE = """\
[run]
steps = 4
name = "big"
[model]
n_layers = 2
[data]
seq_len = 64
global_batch = 32
[[data.sources]]
name = "synthetic"
"""
PROGRAMS = {
    "srun": '#!/bin/sh\nfor word; do echo "$word"; done > ran\nexit "$(cat code)"\n',
    "scontrol": '#!/bin/sh\necho "$@" >> requeued\n',
}


@pytest.fixture
def launch(capsys, tmp_path, monkeypatch):
    """Run `trainer launch` in this process; return exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.toml").write_text(RECIPE)

    def launch(*arguments):
        return run_in_process(capsys, "launch", *arguments)

    return launch


def options(script):
    """Return sbatch's options in a script, as it splits them."""
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH ")]
    assert script.startswith("#!/bin/bash\n" + lines[0])  # sbatch stops at the first other line
    words = [shlex.split(line.removeprefix("#SBATCH ")) for line in lines]
    assert {len(each) for each in words} == {1}
    return {word.partition("=")[0]: word.partition("=")[2] for (word,) in words}


def run_script(script, code, folder):
    """Run a batch script with stand-ins for SLURM's programs; return its exit code."""
    for name, text in PROGRAMS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "code").write_text(str(code))
    environment = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "42"}
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    return subprocess.run(["bash", "-c", script], env=environment, cwd=folder).returncode


def test_the_script_asks_for_what_was_given(launch, tmp_path):
    code, out, _ = launch(
        "slurm", "r.toml", "--nodes", "2", "--gpus-per-node", "4", "--time", "1-12:00",
        "--partition", "gpu,long", "--account", "me",
    )  # fmt: skip
    assert code == 0
    assert options(out) == {
        "--job-name": "big",
        "--nodes": "2",
        "--ntasks-per-node": "4",
        "--gpus-per-node": "4",
        "--chdir": str(tmp_path),
        "--output": "big-%j.out",
        "--time": "1-12:00",
        "--partition": "gpu,long",
        "--account": "me",
        "--open-mode": "append",
        "--requeue": "",
        "--signal": "TERM@300",
    }


@pytest.mark.parametrize("code", [0, 1, 6, 75, 137])
def test_a_run_that_was_stopped_and_saved_alone_is_queued_again(launch, tmp_path, code):
    _, script, _ = launch("slurm", "r.toml", "--set", "data.sources.0.name='synthetic'")
    assert run_script(script, code, tmp_path) == code
    words = (tmp_path / "ran").read_text().splitlines()
    assert words[:4] == [sys.executable, "-P", "-m", "trainer"]
    assert words[4:] == ["run", "r.toml", "--set=data.sources.0.name='synthetic'"]
    requeued = tmp_path / "requeued"
    assert (requeued.read_text() if requeued.exists() else "") == "requeue 42\n" * (code == 75)


def test_it_is_not_queued_again_where_this_is_unwanted(launch, tmp_path):
    _, script, _ = launch("slurm", "r.toml", "--no-requeue")
    assert run_script(script, 75, tmp_path) == 75
    assert not (tmp_path / "requeued").exists()
    assert "--no-requeue" in options(script)
    assert "--requeue" not in options(script)


def test_the_shell_outlives_the_signal_that_its_step_gets(launch, tmp_path):
    """Some clusters send it to the shell too; it still queues the run again."""
    _, script, _ = launch("slurm", "r.toml")
    script = script.replace("srun ", 'kill -TERM "$$"; srun ')
    assert run_script(script, 75, tmp_path) == 75
    assert (tmp_path / "requeued").read_text() == "requeue 42\n"


def test_odd_names_are_quoted(launch, tmp_path):
    odd = "a b; $(touch hit) 'c'.toml"
    (tmp_path / odd).write_text(RECIPE)
    _, script, _ = launch("slurm", odd, "--set", 'run.dir="$HOME `x` \\"y\\""')
    run_script(script, 0, tmp_path)
    words = (tmp_path / "ran").read_text().splitlines()
    assert words[-2:] == [odd, '--set=run.dir="$HOME `x` \\"y\\""']
    assert not (tmp_path / "hit").exists()


def test_a_file_is_written_once(launch, tmp_path):
    code, out, _ = launch("slurm", "r.toml", "-o", "jobs/big.sbatch", "--nodes", "2")
    assert (code, out) == (0, "jobs/big.sbatch: 16 ranks; now: sbatch jobs/big.sbatch\n")
    assert options((tmp_path / "jobs/big.sbatch").read_text())["--nodes"] == "2"
    code, _, err = launch("slurm", "r.toml", "-o", "jobs/big.sbatch")
    assert (code, "give another path, or --force" in err) == (2, True)
    assert launch("slurm", "r.toml", "-o", "jobs/big.sbatch", "--force")[0] == 0


REFUSED = {
    "world": (["--nodes", "3"], "global_batch (32) does not divide over 24 data ranks"),
    "key": (["--set", "run.stpes=3"], 'did you mean "steps"?'),
    "line break in a value": (['--set=run.dir="a\\nb"\n'], "cannot stand in a script"),
    "partition": (["--partition", "gpu;rm"], '--partition "gpu;rm" is no name'),
    "account": (["--account", "-x"], '--account "-x" is no name'),
    "time": (["--time", "soon"], '--time "soon" is no time'),
    "time with a line break": (["--time", "30\n"], '--time "30\\n" is no time'),
    "short time": (["--time", "10"], "--time 10 is too short"),
    "short time in seconds": (["--time", "10:00"], "--time 10:00 is too short"),
    "short time in hours": (["--time", "0:10:00"], "--time 0:10:00 is too short"),
    "short time in days": (["--time", "0-0:10"], "--time 0-0:10 is too short"),
    "resume": (["--set", "run.resume=never"], "the turns after the first would be refused"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_cannot_work_is_refused(launch, case):
    arguments, message = REFUSED[case]
    code, out, err = launch("slurm", "r.toml", *arguments)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("time", ["11", "10:01", "0:10:01", "0-1", "0-0:11", "0-0:10:01"])
def test_times_that_leave_some_to_train(launch, time):
    code, out, _ = launch("slurm", "r.toml", "--time", time)
    assert (code, options(out)["--time"]) == (0, time)


@pytest.mark.parametrize("folder", ["it's", 'a"b', "a\\b", "a\nb"])
def test_a_folder_that_sbatch_may_misread_is_refused(launch, tmp_path, folder, monkeypatch):
    (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / folder)
    code, out, err = launch("slurm", "../r.toml")
    assert (code, out) == (2, "")
    assert "cannot" in err


def test_a_folder_with_a_space_is_quoted(launch, tmp_path, monkeypatch):
    (tmp_path / "a b").mkdir()
    monkeypatch.chdir(tmp_path / "a b")
    assert options(launch("slurm", "../r.toml")[1])["--chdir"] == str(tmp_path / "a b")


def parsed(commands):
    """Return what torchrun's own parser finds in commands."""
    words = [shlex.split(command) for command in commands]
    assert {each[0] for each in words} == {"torchrun"}
    return [vars(get_args_parser().parse_args(each[1:])) for each in words]


def test_torchrun_gets_a_command_for_each_machine(launch):
    code, out, _ = launch(
        "torchrun", "r.toml", "--nodes", "2", "--gpus-per-node", "4", "--host", "gpu-1.local",
        "--port", "3000", "--set", "run.name='a b'".replace(" ", "-"),
    )  # fmt: skip
    assert code == 0
    lines = out.splitlines()
    assert lines[::2] == ["# machine 0", "# machine 1"]
    for node, found in enumerate(parsed(lines[1::2])):
        assert (found["nnodes"], found["nproc_per_node"], found["node_rank"]) == ("2", "4", node)
        assert (found["master_addr"], found["master_port"]) == ("gpu-1.local", 3000)
        assert (found["no_python"], found["training_script"]) == (True, "trainer")
        assert found["training_script_args"] == ["run", "r.toml", "--set=run.name='a-b'"]


def test_torchrun_on_one_machine_needs_no_meeting_point(launch):
    code, out, _ = launch("torchrun", "r.toml", "--gpus-per-node", "4")
    (found,) = parsed(out.splitlines()[1:])
    assert (code, found["standalone"], found["nproc_per_node"]) == (0, True, "4")


def test_torchrun_refuses_what_cannot_work(launch):
    assert launch("torchrun", "r.toml", "--nodes", "3")[0] == 2
    assert launch("torchrun", "r.toml", "--nodes", "2", "--host", "a b")[0] == 2
    assert launch("torchrun", "r.toml", "--set", 'run.dir="a\\nb"\n')[0] == 2
    assert launch("torchrun", "r.toml", "--nodes", "0")[0] == 2


def test_cores_a_container_and_further_options_are_passed_on(launch, tmp_path):
    code, out, err = launch(
        "slurm", "r.toml", "--gpus-per-node", "4", "--cpus-per-task", "12", "--container",
        "reg#a/b:1", "--mounts", "/data:/data", "--directive", "qos=high", "--directive",
        "exclusive",
    )  # fmt: skip
    assert code == 0, err
    found = options(out)
    assert (found["--cpus-per-task"], found["--qos"], found["--exclusive"]) == ("12", "high", "")
    assert run_script(out, 0, tmp_path) == 0
    assert (tmp_path / "ran").read_text().splitlines() == [
        "--cpus-per-task=12",
        "--container-image=reg#a/b:1",
        f"--container-workdir={tmp_path}",
        f"--container-mounts={tmp_path}:{tmp_path},/data:/data",
        "trainer", "run", "r.toml",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["signal=USR1@5", "nodes=9", "Bad=1", "=x", "time=1"])
def test_options_that_the_script_writes_itself_are_refused(launch, text):
    code, _, err = launch("slurm", "r.toml", "--directive", text)
    assert code == 2
    assert "--directive" in err


def test_folders_of_a_container_that_is_not_named_are_refused(launch):
    code, _, err = launch("slurm", "r.toml", "--mounts", "/data:/data")
    assert code == 2
    assert "--container" in err


@pytest.mark.parametrize("kind", [["slurm"], ["torchrun"], ["kubernetes", "--image", "i"]])
def test_files_that_are_not_here_are_warned_about(launch, tmp_path, kind):
    text = RECIPE.replace('name = "synthetic"', 'name = "text"\npath = "corpus/*.txt"')
    (tmp_path / "r.toml").write_text(text)
    code, _, err = launch(*kind, "r.toml")
    assert code == 0
    assert "warning: r.toml:" in err
    assert "does not exist on this machine" in err
    if kind != ["torchrun"]:
        assert launch(*kind, "r.toml", "--offline")[0] == 2
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.txt").touch()
    assert launch(*kind, "r.toml")[2] == ""
