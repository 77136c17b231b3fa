"""What the compiler makes of each kernel, against `kernels/compiled.json`.

A difference fails and is printed. After a change that is meant, write the table anew and commit
it: TRAINER_WRITE_COMPILED=1 python -m pytest tests/kernels/test_compiled_table.py
"""

import difflib
import json
import os

import pytest

from tests.cases import also
from tests.kernels.child import ROOT, needs_triton
from tests.kernels.compiled import SHARED_BYTES, compiled, on_each_triton
from tests.kernels.launches import LAUNCHES, PRODUCTS, WITH_TMA, grouped_dw, grouped_mm

pytestmark = [needs_triton, pytest.mark.matrix]

TABLE = ROOT / "kernels" / "compiled.json"
PRODUCT_OF = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}  # the tensor cores of each generation
SHARED_BY_PRODUCTS = "_list_tiles_kernel"
SLACK = 8  # registers, between patch versions
HINT = "meant? then write the table anew: see the top of this file"
TOKEN_COUNTS = (1, 2, 16, *range(1000, 1017))


def minor(version):
    return ".".join(version.split(".")[:2])


def facts(kernel):
    return {
        "warps": kernel.warps,
        "stages": kernel.stages,
        "shared_bytes": kernel.shared_bytes,
        "registers": kernel.registers,
        "spill_bytes": kernel.spill_bytes,
    }


def label(name, kernel):
    return SHARED_BY_PRODUCTS if kernel.name == SHARED_BY_PRODUCTS else f"{name}: {kernel.name}"


def lines(table):
    return json.dumps(table, indent=2, sort_keys=True).splitlines(keepends=True)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@on_each_triton
@pytest.mark.parametrize("arch", [90, *also(80, 100)])
def test_kernels_are_compiled_as_the_table_says(arch, triton):
    found = {}
    for name, (function, args, archs) in LAUNCHES.items():
        if arch not in archs:
            continue
        kernels = compiled(function, *args, arch=arch, triton=triton)
        found |= {label(name, kernel): facts(kernel) for kernel in kernels}
        for kernel in kernels:
            assert kernel.spill_bytes == 0, (name, kernel)
            assert kernel.shared_bytes <= SHARED_BYTES[arch], (name, kernel)
        if name.startswith(PRODUCTS):
            check_product(name, arch, kernels[-1].instructions)
    key = f"sm_{arch}, triton {minor(triton)}"
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    if os.environ.get("TRAINER_WRITE_COMPILED"):
        TABLE.write_text("".join(lines(table | {key: found})) + "\n")
    else:
        kept = table[key]
        changes = "".join(difflib.unified_diff(lines(kept), lines(found), "kept", "compiled"))
        print(changes)
        assert kept.keys() == found.keys(), changes
        assert all(are_close(kept[name], found[name]) for name in kept), f"{HINT}\n{changes}"


def are_close(kept, found):
    """Return whether two compilers of one minor version may differ so."""
    difference = abs(kept["registers"] - found["registers"])
    return difference <= SLACK and kept == found | {"registers": kept["registers"]}


def check_product(name, arch, instructions):
    if "fp32" in name:
        assert not instructions.keys() & {"HMMA", "HGMMA", "UTCHMMA"}, (name, instructions)
        return
    assert instructions.keys() & set(PRODUCT_OF.values()) == {PRODUCT_OF[arch]}, (
        name,
        instructions,
    )
    is_tma = arch >= 90 and name in WITH_TMA
    assert ("UTMALDG" in instructions) == is_tma, (name, instructions)


@pytest.mark.parametrize("launch", [lambda: (grouped_mm, True), lambda: (grouped_dw,)])
def test_products_compile_for_few_token_counts(launch):
    function, *args = launch()
    names = [kernel.name for kernel in compiled(function, *args, TOKEN_COUNTS)]
    assert len(names) - len(set(names)) <= 1, names
