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
    "engine/tokenizers/fast_bpe.py: pattern",  # escaped texts of special tokens
    "engine/corpus/manifest.py: OTHER_FILE",
    "engine/observe/throughput.py: pattern",  # of a table in the code
    "engine/core/text/expressions.py: translate(pattern)",  # a glob: matched without going back
}
# Everything else that may be of others is read by `files.open_regular`: a fifo would wait for its
# writer, a device never ends. These read what they or the system wrote, or check it first.
OPENS = {
    "engine/checkpoint/tensors.py: os.open",  # a file whose header was read
    "engine/checkpoint/torch_file.py: open",  # what is being written
    "engine/conversion/writing.py: os.open",  # what is being written
    "engine/corpus/checksums.py: open",  # a descriptor
    "engine/corpus/checksums.py: os.open",  # neither follows links nor waits
    "engine/corpus/checksums.py: read_text",  # /proc
    "engine/corpus/cache.py: read_text",  # checked to be a file
    "engine/sources/python_library.py: read_text",  # the interpreter's own library
    "engine/doctor/machine.py: read_text",  # /proc
    "engine/drawing/page.py: read_text",  # ours
    "engine/core/files.py: open",  # a descriptor
    "engine/core/files.py: os.open",  # the one place
    "engine/inference/prediction_file.py: open",  # what is being written
    "engine/launch/failure.py: open",  # the log of a rank
    "engine/core/processes.py: os.open",  # neither follows links nor waits
    "engine/observe/throughput.py: read_text",  # /proc
    "engine/optim/library/table.py: read_text",  # ours
    "engine/precision/hardware.py: read_text",  # /proc
    "engine/recipe/documents/pages.py: read_text",  # ours
    "engine/recipe/documents/starter.py: read_text",  # ours
    "engine/tasks/metrics/tables.py: read_text",  # ours
    "model_zoo/hf_settings.py: read_text",  # ours
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


def opens(node):
    """Return what a call opens a file to read by; empty: it does no such thing."""
    name = full_name(node.func)
    method = getattr(node.func, "attr", "")
    if method in ("read_text", "read_bytes"):
        return method
    if name == "os.open":
        flags = ast.unparse(node.args[1])
        return "" if re.search("O_WRONLY|O_RDWR|^flags$", flags) else name
    if name == "open" or (method == "open" and len(node.args) < 2):
        modes = node.args[name == "open" :] or [k.value for k in node.keywords if k.arg == "mode"]
        mode = modes[0].value if modes and isinstance(modes[0], ast.Constant) else "r"
        return "open" if "r" in mode and (modes or not node.args or name == "open") else ""
    return ""


def test_files_of_others_are_opened_in_one_place():
    found = {
        f"{name(path)}: {how}"
        for path in modules("cli", "engine", "model_zoo")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and (how := opens(node))
    }
    assert found == OPENS


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
