"""Where code lies, and who may see what; the layers are import-linter's (`pyproject.toml`)."""

from tests.architecture.measure import (
    circles,
    deferred_imports,
    files_by_folder,
    mutual_packages,
    readers_of_recipes,
)

MOST_FILES = 16
MOST_CIRCLES = 3
MOST_DEFERRED = (
    24  # each one is a boundary that is missing, or a slow part of torch that few runs need
)
# In these, only entry points; all of assemble, run and federated may.
SEE_A_WHOLE_RECIPE = {
    "engine/check/adapt.py",
    "engine/check/check_plan.py",
    "engine/check/jobs.py",
    "engine/check/rank.py",
    "engine/check/shrink.py",
    "engine/conversion/convert.py",
    "engine/conversion/gguf.py",
    "engine/conversion/meta.py",
    "engine/conversion/source_weights.py",
    "engine/conversion/sources.py",
    "engine/conversion/targets.py",
    "engine/conversion/titan.py",
    "engine/doctor/graphs.py",
    "engine/estimate/memory.py",
    "engine/estimate/plan.py",
    "engine/estimate/roofline.py",
    "engine/estimate/search.py",
    "engine/estimate/simulate/build.py",
    "engine/estimate/simulate/extrapolate.py",
    "engine/estimate/simulate/sizes.py",
    "engine/estimate/speed.py",
    "engine/estimate/step_sizes.py",
    "engine/inference/inputs.py",
    "engine/inference/open.py",
    "engine/inference/precompute.py",
}


def test_no_two_packages_import_each_other():
    assert mutual_packages() == set()


def test_few_modules_import_each_other():
    found = circles()
    assert len(found) <= MOST_CIRCLES, found
    for modules in found:
        assert len({module.rpartition("/")[0] for module in modules}) == 1, modules


def test_folders_can_be_read_at_a_glance():
    counts = files_by_folder()
    assert counts["engine"] == 0, "each module of the engine is in a package"
    crowded = {folder: count for folder, count in counts.items() if count > MOST_FILES}
    assert crowded.keys() <= {"cli"}, "cli/ has one file a command"


def test_imports_are_at_the_top():
    found = deferred_imports()
    assert len(found) <= MOST_DEFERRED, "\n".join(found)


def test_a_whole_recipe_is_seen_by_few():
    found = {
        module
        for module in readers_of_recipes()
        if not module.startswith(("engine/assemble/", "engine/run/", "engine/federated/"))
    }
    assert found == SEE_A_WHOLE_RECIPE
