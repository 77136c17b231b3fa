from __future__ import annotations

import pytest

from trainer.engine.core.errors import EnvironmentFault
from trainer.engine.launch.environment import World, find_world, first_host, tasks_per_node

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NODELIST": "gpu[07-09]",
}


def test_an_empty_environment_is_one_process() -> None:
    assert find_world({}) == World()


def test_a_container_that_sets_the_master_address_is_still_one_process() -> None:
    assert find_world({"MASTER_ADDR": "localhost", "WORLD_SIZE": "1"}) == World()


def test_our_launcher() -> None:
    names = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    world = find_world(
        {**names, "TRAINER_STORE": "/tmp/x/store", "TRAINER_ATTEMPT": "3", "MASTER_PORT": "stale"}
    )
    assert world == World(1, 2, 1, 2, 0, "trainer", "/tmp/x/store", attempt=3)


def test_torchrun() -> None:
    world = find_world(TORCHRUN)
    assert world == World(
        5, 8, 1, 4, 1, "torchrun", "tcp://node1:29500", launcher_serves_store=True, attempt=2
    )


def test_a_kubernetes_pod_that_knows_only_its_rank() -> None:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    world = find_world({name: TORCHRUN[name] for name in names})
    assert (world.rank, world.local_rank, world.local_world_size) == (5, 0, 1)
    assert not world.launcher_serves_store


def test_slurm() -> None:
    world = find_world(SLURM)
    assert (world.rank, world.world_size, world.local_rank) == (6, 7, 2)
    assert (world.local_world_size, world.node_rank, world.launcher) == (3, 1, "slurm")
    assert world.rendezvous == "tcp://gpu07:13456"


def test_all_ranks_of_a_slurm_step_meet_at_one_place_and_other_steps_elsewhere() -> None:
    places = {
        find_world(
            {**SLURM, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0", **step}
        ).rendezvous
        for step in ({}, {"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "123458"})
    }
    assert len(places) == 3
    assert find_world(SLURM).rendezvous in places


def test_slurm_with_an_address_of_the_users_choice() -> None:
    world = find_world({**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4242"})
    assert world.rendezvous == "tcp://10.0.0.1:4242"


def test_a_batch_script_without_srun_is_one_process_and_says_so() -> None:
    environ = {name: value for name, value in SLURM.items() if "STEP" not in name}
    world = find_world(environ)
    assert world.world_size == 1
    assert "srun" in world.note


def test_torchrun_inside_a_slurm_job_wins() -> None:
    assert find_world({**SLURM, **TORCHRUN}).launcher == "torchrun"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"RANK": "8"}, "rank 8 of 8"),
        ({"RANK": "-1"}, "RANK"),
        ({"RANK": "one"}, "RANK"),
        ({"RANK": ""}, "RANK"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "99999999999"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "8.0"}, "WORLD_SIZE"),
        ({"LOCAL_RANK": "4"}, "local rank 4 of 4"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK"),
        ({"LOCAL_WORLD_SIZE": "16"}, "16 processes on this machine"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT"),
        ({"RANK": None}, "RANK is not set"),
    ],
)
def test_torchrun_variables_that_make_no_sense(changes: dict[str, str | None], word: str) -> None:
    environ = {name: value for name, value in {**TORCHRUN, **changes}.items() if value is not None}
    with pytest.raises(EnvironmentFault, match=word):
        find_world(environ)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "4,4"}, "SLURM_STEP_TASKS_PER_NODE"),
        ({"SLURM_STEP_TASKS_PER_NODE": "four"}, "SLURM_STEP_TASKS_PER_NODE"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID"),
        ({"SLURM_PROCID": "7"}, "rank 7 of 7"),
        ({"SLURM_LOCALID": "3"}, "local rank 3 of 3"),
        ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID"),
        ({"SLURM_STEP_NODELIST": " "}, "SLURM_STEP_NODELIST"),
    ],
)
def test_slurm_variables_that_make_no_sense(changes: dict[str, str], word: str) -> None:
    with pytest.raises(EnvironmentFault, match=word):
        find_world({**SLURM, **changes})


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[003-005,9],login1", "gpu003"),
        ("login1,gpu[003-005,9]", "login1"),
        ("gpu[7,9]", "gpu7"),
        ("rack[0-1]node[12-14]", "rack0node12"),
        ("a-b-[01-02]-ib", "a-b-01-ib"),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_tasks_per_node() -> None:
    assert tasks_per_node("4(x2),1") == [4, 4, 1]
    assert tasks_per_node("3") == [3]
