"""Nothing that is read may run code, and nothing that is written may name a machine."""

import ast
import re

from tests.architecture.sources import PACKAGES, files, modules, name, tree

RUNS_CODE = {
    "pickle.load", "pickle.loads", "pickle.Unpickler", "pickle._Unpickler",
    "torch.load", "torch.hub.load", "numpy.lib.format.open_memmap", "marshal.loads",
    "shelve.open", "joblib.load", "yaml.load", "dill.loads", "cloudpickle.loads",
    "eval", "exec", "compile", "os.system", "os.popen",
}  # fmt: skip
# The one names the few classes of DCP's table of contents, and refuses all others. The other
# reads with `weights_only`, and no data.
GUARDED = {
    "engine/checkpoint/guarded.py: pickle._Unpickler",
    "engine/checkpoint/torch_file.py: torch.load",
}
EXPRESSIONS = {f"re.{each}" for each in ("compile", "search", "match", "fullmatch", "sub", "split")}
EXPRESSIONS |= {"re.findall", "re.finditer"}
OWN_EXPRESSIONS = {
    "engine/data/fast_bpe.py: pattern",  # escaped texts of special tokens
    "engine/data/manifest.py: OTHER_FILE",
    "engine/observe/throughput.py: pattern",  # of a table in the code
    "engine/optim/groups.py: translate(pattern)",  # a glob: matched without going back
}
MACHINE = re.compile(
    r"(?<![\w.~/])/(?:(?:root|work|mnt|opt|Users|data|scratch|srv|nfs)/|home/(?!me\b|someone\b))[\w.-]+"
    r"|[\w.-]+\.(?:internal|corp|lan)\b|\bpypi\.\w|pythonhosted\.\w"
)
TEXT = {".py", ".toml", ".md", ".txt", ".json", ".jsonl", ".ini", ".cfg", ""}


def full_name(node):
    """Return the dotted name of an expression, or an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := full_name(node.value)):
        return f"{before}.{node.attr}"
    return ""


def used_names(path):
    """Yield the dotted name of everything that a module calls, subclasses or imports."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            yield full_name(node.func)
        elif isinstance(node, ast.ClassDef):
            yield from map(full_name, node.bases)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_module_reads_what_can_run_code():
    found = {
        f"{name(path)}: {used}"
        for path in modules(*PACKAGES)
        for used in used_names(path)
        if used in RUNS_CODE
    }
    assert found == GUARDED


def test_expressions_of_users_are_compiled_by_re2_alone():
    """Python's own module may take for ever; its expressions are written in the code."""
    found = {
        f"{name(path)}: {ast.unparse(node.args[0])}"
        for path in modules(*PACKAGES)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and full_name(node.func) in EXPRESSIONS
        if not isinstance(node.args[0], ast.Constant)
    }
    assert found == OWN_EXPRESSIONS


def test_pickles_are_never_allowed_by_an_option():
    options = [
        f"{name(path)}:{node.value.lineno}"
        for path in modules(*PACKAGES)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.keyword)
        and isinstance(node.value, ast.Constant)
        and (node.arg, node.value.value) in {("weights_only", False), ("allow_pickle", True)}
    ]
    assert options == []


def test_arrays_are_read_without_pickles():
    """`numpy.load` would unpickle only with `allow_pickle`; say no where it is called."""
    calls = [
        node
        for path in modules(*PACKAGES)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and full_name(node.func) in ("np.load", "numpy.load")
    ]
    assert all(any(keyword.arg == "allow_pickle" for keyword in call.keywords) for call in calls), [
        call.lineno for call in calls
    ]


def test_no_file_names_a_machine():
    found = [
        f"{name(path)}:{number}: {match[0]}"
        for path in files()
        if path.suffix in TEXT and path.name != "LICENSE"
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        for match in MACHINE.finditer(line)
    ]
    assert found == []
