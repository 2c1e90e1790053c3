from __future__ import annotations

import contextlib
import errno
import fcntl
import subprocess
import sys

import pytest

from jaxrec.commands import main
from jaxrec.train.checkpoint.files import lock_directory
from tests.commands.test_train import SMALL

# Locks a file, says so, and waits to be killed.
OTHER_RUN = """
import fcntl, sys
file = open(sys.argv[1], "a+")
fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
file.write("process 7 on host8")
file.flush()
print("locked", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def other_run(directory):
    command = [sys.executable, "-P", "-c", OTHER_RUN, str(directory / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"locked\n"
        yield process
        process.kill()


def is_locked(directory):
    """Whether another process finds the lock."""
    # Only an exclusive lock keeps out a shared one.
    program = OTHER_RUN.replace("LOCK_EX", "LOCK_SH")
    command = [sys.executable, "-P", "-c", program, str(directory / ".lock")]
    done = subprocess.run(command, input=b"", capture_output=True, check=False)
    return done.returncode != 0 and b"BlockingIOError" in done.stderr


def test_the_command_refuses_a_second_run_at_once(tmp_path, capsys):
    output = tmp_path / "run"
    output.mkdir()
    command = ["train", *SMALL, f"--output={output}"]
    with other_run(output):
        assert main(command) == 1
        said = capsys.readouterr().err
        assert said == (
            f"jaxrec train: {output}: another run writes here (process 7 on host8); stop it, or "
            "choose another directory\n"
        )
        assert [path.name for path in output.iterdir()] == [".lock"]
    # The other run was killed by SIGKILL: its lock is gone.
    with lock_directory(output):
        assert (output / ".lock").read_text().startswith("process ")
        assert "host8" not in (output / ".lock").read_text()


def test_one_process_locks_several_times(tmp_path):
    directory = tmp_path / "a" / "b"
    with lock_directory(directory):
        with lock_directory(str(directory)):
            assert is_locked(directory)
        assert is_locked(directory)
    assert not is_locked(directory)


def test_file_systems_without_locks(tmp_path, monkeypatch):
    def lockf(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with (
        pytest.warns(UserWarning, match="only one run writes here"),
        lock_directory(tmp_path),
    ):
        pass
