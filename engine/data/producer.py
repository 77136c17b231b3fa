"""The process that tokenises a stream's windows beside training."""

from __future__ import annotations

import json
import os
import shutil
import signal
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from weakref import finalize

from ..core.errors import DataError, EnvironmentFault, TrainerError
from ..core.files import publish
from ..core.processes import die_with_parent, lock_file, unlock
from ..corpus.store import StoreWriter
from ..corpus.tokenise import tokenise
from ..sources.configs import DocumentSource
from ..tokenizers.tokenizer import Tokenizer
from .windows import (
    CURSORS,
    PrefetchRange,
    WindowReader,
    WindowStart,
    open_window,
    window_folder,
    window_size,
)

WRITABLE = "set data.cache_dir to a folder that is writable and has room"


@dataclass
class Producer:
    """Writes the windows that training is about to need, and deletes those behind it.

    Args:
        source: the documents.
        tokenizer: makes the tokens.
        folder: holds the windows.
        seq_len: tokens a row.
    """

    source: DocumentSource
    tokenizer: Tokenizer
    folder: Path
    seq_len: int

    def serve(self, training: Connection, parent: int) -> None:
        """Run the process: receive a `WindowStart` and `PrefetchRange`s, and send any error."""
        die_with_parent(parent)
        try:
            self._serve(training)
        except EOFError:
            pass
        except TrainerError as error:
            training.send((type(error), error.message, error.hint))
        except OSError as error:
            what = f"cannot write tokens to {self.folder}: {error.strerror or error}"
            training.send((EnvironmentFault, what, WRITABLE))
        except Exception as error:  # whatever it is, it must reach the training process
            training.send((DataError, f"{self.source.name}: {type(error).__name__}: {error}", ""))
        # Not sys.exit: a forked child must not run the exit handlers of the training process.
        os._exit(0)

    def _serve(self, training: Connection) -> None:
        start: WindowStart = training.recv()
        needed: PrefetchRange = training.recv()
        number = start.number
        self._delete_outside(needed)
        reader = WindowReader(self.source, start.cursor)
        while True:
            while training.poll() or number > needed.newest:
                needed = training.recv()
                self._delete_outside(needed)
            # A window that an earlier attempt of the run wrote is used again.
            window = open_window(self.folder, number, self.tokenizer)
            if window is not None and window.start == reader.cursor:
                reader = WindowReader(self.source, window.end)
            else:
                self.write_window(reader, number)
            number += 1

    def write_window(self, reader: WindowReader, number: int) -> None:
        """Tokenise the reader's next documents into a window.

        Raises:
            DataError: a document cannot be read, or the source holds no text.
            OSError: the window cannot be written.
        """
        folder = window_folder(self.folder, number)
        unfinished = folder.with_suffix(f".{os.getpid()}")
        start = reader.cursor
        _delete(folder)
        with StoreWriter(unfinished, self.tokenizer) as writer:
            while not writer.num_tokens:
                # The window may begin inside an epoch, and only a whole one without text shows that
                # the source has none.
                if reader.cursor.epoch > start.epoch + 1:
                    skipped = writer.tally.skipped
                    raise DataError(
                        f'the "{self.source.name}" source holds no text ({skipped} skipped)'
                    )
                documents = reader.read(window_size(number, self.seq_len))
                for chunk in tokenise(documents, self.source.on_error, self.tokenizer):
                    writer.write(chunk)
            cursors = json.dumps({"start": start, "end": reader.cursor})
            (unfinished / CURSORS).write_text(cursors, encoding="utf-8")
            writer.finish()
        publish(unfinished, folder)

    def _delete_outside(self, needed: PrefetchRange) -> None:
        """Delete the windows outside a range, and those that an earlier process did not finish."""
        for folder in self.folder.iterdir():
            number = int(folder.name) if folder.name.isdecimal() else -1
            if folder.is_dir() and not needed.oldest <= number <= needed.newest:
                _delete(folder)


def _delete(folder: Path) -> None:
    """Delete a window; a process that opens it meanwhile finds it complete or not at all."""
    renamed = folder.with_name(f"gone.{os.getpid()}")
    with suppress(FileNotFoundError):
        folder.rename(renamed)
        shutil.rmtree(renamed)


class ProducerProcess:
    """The child process of a producer, as training sees it. It ends with this object.

    Args:
        pid: the id of the child process.
        pipe: this process's end of the pipe between both.
        lock: a lock that is held until both processes have ended.
    """

    def __init__(self, pid: int, pipe: Connection, lock: int) -> None:
        self.pid = pid
        self.failure: TrainerError | None = None
        self._pipe = pipe
        self._needed: PrefetchRange | None = None
        self._end = finalize(self, _end_process, pid, pipe, lock)

    def request(self, start: WindowStart, needed: PrefetchRange) -> None:
        """Send which windows training needs; the first request says where to start."""
        with suppress(OSError):  # it may have ended: `is_alive` says why
            if self._needed is None:
                self._pipe.send(start)
            if needed != self._needed:
                self._pipe.send(needed)
                self._needed = needed

    def is_alive(self, wait_seconds: float) -> bool:
        """Wait a little for the end of the process; return whether it lives, or set `failure`."""
        with suppress(EOFError, OSError):
            if not self._pipe.poll(wait_seconds):
                return True
            kind, message, hint = self._pipe.recv()
            self.failure = kind(message, hint)
        self._end()
        return False


def _end_process(pid: int, pipe: Connection, lock: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    # Waited for, so that it does not stay behind as a zombie.
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)
    pipe.close()
    unlock(lock)


def start_producer(producer: Producer) -> ProducerProcess | None:
    """Start the process; None if another process of this machine has one for the same stream.

    Raises:
        EnvironmentFault: the cache cannot be written.
    """
    try:
        producer.folder.mkdir(parents=True, exist_ok=True)
        # Inherited: while a producer whose parent has died still writes, no other one starts.
        lock = lock_file(producer.folder / "lock", inherit=True)
    except BlockingIOError:
        return None
    except OSError as error:
        raise EnvironmentFault(
            f"cannot write tokens to {producer.folder}: {error.strerror}", WRITABLE
        ) from error
    parent = os.getpid()
    pipe, other = Pipe()
    # Forked: it starts at once, and a script that trains needs no `if __name__` guard.
    pid = os.fork()
    if not pid:
        pipe.close()
        producer.serve(other, parent)  # it never returns
    other.close()
    return ProducerProcess(pid, pipe, lock)
