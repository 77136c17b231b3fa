"""Names are found by a search: no two public classes share one."""

import ast
from collections import defaultdict

from tests.architecture.sources import PACKAGES, modules, name, tree


def test_no_two_public_classes_share_a_name():
    homes = defaultdict(list)
    for path in modules(*PACKAGES):
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(name(path))
    assert len(homes) > 100
    assert {word: paths for word, paths in homes.items() if len(paths) > 1} == {}
