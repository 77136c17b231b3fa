"""Run `trainer ...` in processes that start with torch imported.

    done = run_trainer("validate", "recipe.toml", folder=tmp_path)
    assert done.returncode == 0, done.stderr

Importing takes two seconds of a processor. Tests of how a process starts, and of launchers, start
one themselves.
"""

import os
import subprocess
import sys
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.distributed import CONTEXT
from trainer.cli import main as cli
from trainer.engine.launch.child import rank_environment
from trainer.engine.launch.environment import ATTEMPT, STORE


def run_in_process(capsys, *words):
    """Run a command line in this process; return the exit code, the output and the errors."""
    with pytest.raises(SystemExit) as stop:
        cli.main([str(word) for word in words])
    return (int(stop.value.code), *capsys.readouterr())


def run_trainer(*words, folder, path=(), ranks=1, timeout=280.0, **environ):
    """Run a command line, and return its exit code and what it printed.

    Args:
        words: the command and its arguments.
        folder: the working directory.
        path: folders of modules that it can import, such as a plugin's.
        ranks: how many processes run it, as `--nproc` would start them. The output is that of rank
            0, the exit code that of the first rank that failed.
        timeout: seconds after which the processes are killed, and the test fails.
        environ: variables beside those of this process.
    """
    paths = [*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environ}
    with TemporaryDirectory() as own:
        processes = []
        for rank in range(ranks):
            own_environ = environ
            if ranks > 1:
                own_environ = rank_environment(environ, rank, ranks)
                own_environ |= {STORE: f"{own}/store", ATTEMPT: "0"}
            line = ["trainer", *map(str, words)]
            arguments = (line, str(folder), own_environ, f"{own}/{rank}")
            processes.append(CONTEXT.Process(target=_run_on_rank, args=arguments))
            processes[-1].start()
        for process in processes:
            process.join(timeout)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
        assert None not in codes, f"still running after {timeout} s: trainer {words}"
        code = next((code for code in codes if code), 0)
        out = Path(f"{own}/0.out").read_text("utf-8")
        errors = [Path(f"{own}/{rank}.err").read_text("utf-8") for rank in range(ranks)]
    return subprocess.CompletedProcess(words, code, out, "".join(errors))


def _run_on_rank(line, folder, environ, output):
    new = os.O_WRONLY | os.O_CREAT
    files = [
        os.open(os.devnull, os.O_RDONLY),
        *(os.open(output + end, new) for end in (".out", ".err")),
    ]
    code = 1
    try:
        code = run_here(line, folder, environ, files)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_here(line, folder, environ, files):
    """Turn this process into a program's: run `trainer` and return its exit code.

    Args:
        line: name and arguments of the program.
        folder: the working directory.
        environ: the whole environment.
        files: descriptors of the standard streams.
    """
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    # The streams of the process that forked were made for other kinds of files.
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", 1)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:0] = filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = line
    from trainer.cli.main import main

    try:
        main(line[1:])
    except SystemExit as end:
        return end.code or 0
    return 0
