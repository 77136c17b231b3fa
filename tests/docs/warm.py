"""A server with torch imported that forks for each `trainer ...` of a document.

Importing takes two seconds of a processor, which a page would pay dozens of times. The program
hands its arguments, folder, environment and open files to the server, and ends with the exit code
that comes back.
"""

import os
import pickle
import socket
import sys
import time
import traceback
from multiprocessing import current_process

from tests.commands import run_here
from tests.distributed import CONTEXT

PROGRAM = """#!{python} -SE
import os, pickle, socket, sys
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({address!r})
environment = dict(os.environ)
environment["PYTHONPATH"] = {path!r} + os.pathsep + environment.get("PYTHONPATH", "")
message = pickle.dumps((sys.argv, os.getcwd(), environment))
socket.send_fds(server, [message], [0, 1, 2])
sys.exit(server.recv(1)[0])
"""


def start_server(program, python_path):
    """Start a server, and write the executable that runs `trainer` there.

    Args:
        program: path of the executable.
        python_path: folder that comes first in PYTHONPATH.
    """
    address = f"\0trainer-tests-{os.getpid()}-{time.monotonic_ns()}"  # no file is left of it
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen()
    server = CONTEXT.Process(target=serve, args=(listener,), daemon=True)
    server.start()
    listener.close()
    text = PROGRAM.format(python=sys.executable, address=address, path=str(python_path))
    program.write_text(text)
    program.chmod(0o755)
    return server


def serve(listener):
    """Answer each connection in a process of its own."""
    while True:
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            os._exit(answer(client))
        client.close()


def answer(client):
    """Run one command line and send its exit code."""
    message, files, *_ = socket.recv_fds(client, 2**20, 3)
    worker = os.fork()
    if worker == 0:
        client.close()
        current_process()._config["daemon"] = False  # a program of its own may start processes
        code = 1
        try:
            code = run_here(*pickle.loads(message), files)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    client.send(bytes([code if code >= 0 else 128 - code]))
    return 0
