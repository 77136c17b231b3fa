"""Pipelines that cannot work are refused when the recipe is read, with the place of the mistake."""

from contextlib import suppress

import pytest

from trainer.engine.core.errors import RecipeError
from trainer.engine.parallel.pipeline.grid import schedule_grid
from trainer.engine.parallel.pipeline.schedule_file import MAX_BYTES, read_schedule

RECIPE = """
[run]
steps = 1
[model]
n_layers = 4
[data]
micro_batch = 1
global_batch = 4
[parallel]
pipeline = 2
[parallel.pipelining]
"""
KEY = "parallel.pipelining."


def modules(*stages):
    return f"modules_per_stage = {[list(stage.split()) for stage in stages]}"


ALL = ("embed layers.0 layers.1", "layers.2 layers.3 head")
CUTS = {
    "misspelled": (
        modules("embed layer.0 layers.1", ALL[1]),
        "modules_per_stage", "the model has no 'layer.0'", 'did you mean "layers.0"?',
    ),
    "unlike any": (
        modules("embed qqqq layers.0 layers.1", ALL[1]),
        "modules_per_stage", "the model has no 'qqqq'", "there are embed, layers.0, ..., head",
    ),
    "missing": (
        modules("embed layers.0", "layers.2 layers.3 head"),
        "modules_per_stage", "in no stage: layers.1", "",
    ),
    "more missing": (
        modules("layers.0", "layers.3 head"),
        "modules_per_stage", "in no stage: embed and 2 more", "",
    ),
    "twice": (
        modules(ALL[0], f"layers.1 {ALL[1]}"),
        "modules_per_stage", "layers.1 is given 2 times", "a module is in one stage",
    ),
    "order": (
        modules("embed layers.1 layers.0", ALL[1]),
        "modules_per_stage", "layers.1 stands before layers.0",
        "the order is embed, layers.0, ..., head",
    ),
    "head first": (
        modules(ALL[1], ALL[0]),
        "modules_per_stage", "head stands before embed", "the order is embed, layers.0, ..., head",
    ),
    "stages": (
        modules("embed", "layers.0 layers.1", "layers.2 layers.3 head"),
        "modules_per_stage", "3 stages are given, this plan has 2",
        "give as many lists, or other ranks, or stages_per_rank",
    ),
    "both": (
        f"layers_per_stage = [2, 2]\n{modules(*ALL)}",
        "modules_per_stage", "the cut is given by layers_per_stage too", "keep one of them",
    ),
    "measured": (
        f'cost = "measured"\n{modules(*ALL)}',
        "cost", "the cut is given: nothing is measured", "keep one of them",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", list(CUTS))
def test_a_cut_that_is_none_is_refused(problems, fault):
    text, key, message, hint = CUTS[fault]
    found = problems(RECIPE + text, world=2)
    assert (KEY + key, message, hint) in [(each.key, each.message, each.hint) for each in found]


def test_blocks_that_nobody_could_list_are_refused_at_once(problems):
    found = problems(RECIPE.replace("= 4", f"= {2**31}", 1) + modules(*ALL), world=2)
    assert "more than 10,000 blocks are not cut by names" in [each.message for each in found]


def test_an_empty_stage_is_refused(problems):
    (found,) = problems(RECIPE + 'modules_per_stage = [["embed"], []]', world=2)
    assert "at least 1" in found.message


def test_ends_may_be_stages_of_their_own(load):
    names = modules("embed", "layers.0 layers.1 layers.2 layers.3", "head")
    assert load(RECIPE.replace("pipeline = 2", "pipeline = 3") + names, world=3)


ONE_MICRO_BATCH = "0F0,,,0B0\n,1F0,1B0,\n"
LAST_IN_ORDER = "the last stage's forward passes must come in order"
FILES = {
    "word": ("0F0,x\n", "row 1, cell 2: 'x' is no action", "write the stage, F, B, I or W"),
    "message": ("0F0,0SEND_F0\n", "row 1, cell 2: '0SEND_F0' is no action", "no communication"),
    "empty": (",,\n\n", "no action is in it", ""),
    "two ranks": (
        "0F0,1F0\n1B0,0B0\n",
        "row 2, cell 1: 1B0: stage 1 is another rank's (row 1, cell 2: 1F0)",
        "",
    ),
    "no such stage": ("0F0,0B0\n7F0,7B0\n", "stage 1 is nowhere, and stage 7 is", ""),
    "twice": (
        "0F0,0F0,0B0\n1F0,1B0\n",
        "row 1, cell 2: 0F0 is done already (row 1, cell 1: 0F0)",
        "",
    ),
    "two backwards": (
        "0F0,0I0,0B0\n1F0,1B0\n",
        "row 1, cell 3: 0B0 is done already (row 1, cell 2: 0I0)",
        "",
    ),
    "no backward": ("0F0\n1F0,1B0\n", "0I0 is nowhere (nor 0B0)", "each stage does F"),
    "half a backward": ("0F0,0I0\n1F0,1B0\n", "0W0 is nowhere", "each stage does F"),
    "one of two": ("0F0,0F1,0B0,0B1\n1F0,1B0,1B1\n", "1F1 is nowhere", "each stage does F"),
    "huge": ("999999F999999\n", "stage 0 is nowhere, and stage 999999 is", ""),
    "backward first": (
        "0B0,0F0\n1F0,1B0\n",
        "at row 1, cell 1: 0B0; row 2, cell 1: 1F0",
        "a forward follows",
    ),
    "deadlock": (
        "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
        "at row 1, cell 2: 0B0; row 2, cell 2: 1F1",
        "",
    ),
    "order": (
        "0F0,0F1,0B0,0B1\n1F1,1B1,1F0,1B0\n",
        f"row 2, cell 1: 1F1: {LAST_IN_ORDER}",
        "1F0 is next",
    ),
    "no text": (b"\xff\xfe", "is no text of comma-separated cells", ""),
    "binary": (b"0F0\x00,1", "no action", ""),
    "large": ("," * (MAX_BYTES + 1), f"has more than {MAX_BYTES:,} bytes", ""),
}


@pytest.mark.parametrize("fault", list(FILES))
def test_a_schedule_that_is_none_is_refused_where_it_is_wrong(problems, write, fault):
    text, message, hint = FILES[fault]
    write("schedule.csv", text)
    (found,) = problems(RECIPE + 'csv = "schedule.csv"', world=2)
    assert found.key == KEY + "csv"
    assert "schedule.csv" in found.message
    assert message in found.message
    assert hint in found.hint


def test_a_missing_file_is_named(problems):
    (found,) = problems(RECIPE + 'csv = "schedule.csv"', world=2)
    assert found.message.endswith("schedule.csv cannot be read: No such file or directory")


MISFITS = {
    "ranks": (
        ONE_MICRO_BATCH + ",,2F0,2B0\n",
        "",
        "csv",
        "the file has rows for 3 ranks, parallel.pipeline is 2",
        "set parallel.pipeline = 3",
    ),
    "micro batches": (
        ONE_MICRO_BATCH,
        "",
        "micro_batches",
        "the file has 1 micro batches, these are 4",
        "set micro_batches = 1",
    ),
    "two schedules": (
        ONE_MICRO_BATCH,
        'schedule = "GPipe"',
        "csv",
        'schedule = "GPipe" is given too',
        "keep one of them",
    ),
    "stages a rank": (
        ONE_MICRO_BATCH,
        "stages_per_rank = 2",
        "stages_per_rank",
        "the file says which stages each rank holds",
        "leave it out",
    ),
    "blocks": (
        "0F0,2F0,4F0,4B0,2B0,0B0\n1F0,3F0,3B0,1B0\n",
        "",
        "",
        "5 stages are more than model.n_layers = 4",
        "",
    ),
    "shared weight": (
        "0F0,2F0,2I0,0B0,2W0\n1F0,1B0\n",
        "[model]\ntie_embeddings = true",
        "csv",
        "2W0 comes after stage 0 has ended, and both have the weight of the embedding",
        "let it come before",
    ),
}


@pytest.mark.parametrize("fault", list(MISFITS))
def test_a_schedule_must_fit_the_plan(problems, write, fault):
    text, more, key, message, hint = MISFITS[fault]
    write("schedule.csv", text)
    recipe = RECIPE + 'csv = "schedule.csv"\n' + more
    if more.startswith("[model]"):
        recipe = RECIPE.replace("[model]", more) + 'csv = "schedule.csv"\n'
    found = problems(recipe, world=2)
    assert any(message == p.message and hint in p.hint and key in p.key for p in found), found


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_torchs_own_schedules_are_read_back(schedule, tmp_path):
    """As torch writes them, two actions in a cell included."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    stages = 2 if schedule == "1F1B" else 4
    grid = schedule_grid(schedule, 2, stages, 4)
    if schedule != "1F1B":
        grid = [[str(a or "") for a in row] for row in get_schedule_ops(schedule, 2, 4, 2)]
    path = tmp_path / "schedule.csv"
    path.write_text("".join(",".join(cell or "" for cell in row) + "\r\n" for row in grid))
    found = read_schedule(path)
    expected = [[cell for cell in row if cell] for row in schedule_grid(schedule, 2, stages, 4)]
    assert [list(map(str, row)) for row in found.rows] == expected
    assert found.micro_batches == 4
    folded = (0, 1, 1, 0) if schedule in ("ZBVZeroBubble", "DualPipeV") else (0, 1, 0, 1)
    assert found.stage_to_rank == folded[:stages]


def test_a_damaged_file_never_ends_in_anything_but_an_answer(tmp_path):
    """Any byte of a schedule may be another one."""
    path = tmp_path / "schedule.csv"
    for place in range(len(ONE_MICRO_BATCH)):
        for byte in (b"9", b"(", b'"', b"\n", b"\x00", b"\xff"):
            text = ONE_MICRO_BATCH.encode()
            path.write_bytes(text[:place] + byte + text[place + 1 :])
            with suppress(RecipeError):
                assert read_schedule(path).micro_batches == 1
