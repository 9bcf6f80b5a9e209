"""A `python` whose processes are forks of a server that has imported slow packages, by default none of the project.

Run as a program, this module is the server: it listens on the given Unix socket as long as the process with the given
ID exists.
"""

import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

PACKAGES = ("torch._dynamo", "transformers.models.llama.modeling_llama", "matplotlib.pyplot", "scipy.optimize", "zarr")
"""Packages that most processes import, directly or indirectly."""

# Started once per process, so it imports next to nothing, and no site-packages.
_CLIENT = """#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    message = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [len(message).to_bytes(4, "big")], [0, 1, 2])
    server.sendall(message)
    code = server.recv(1)
    sys.exit(int.from_bytes(code, "big") if code else 1)
"""


@contextlib.contextmanager
def warm_python(
    bin_folder: Path, imported: Sequence[str] = PACKAGES, path: str = "", python: Path | str = sys.executable
) -> Iterator[Path]:
    """Provide ``bin_folder/python``, which runs ``-m MODULE``, ``-c CODE`` or a file in a fork of the server.

    Parameters
    ----------
    imported
        Modules that the server imports for all forks.
    path
        PYTHONPATH of the server.
    python
        Interpreter that starts the server; the server outlives the block, until the tests end, if it is a warm one.
    """
    bin_folder.mkdir()
    # Socket addresses have at most about 100 characters, which the folder of a test may use up.
    with tempfile.TemporaryDirectory() as short:
        address, client = f"{short}/socket", bin_folder / "python"
        client.write_text(_CLIENT.format(python=Path(sys.executable).resolve(), address=address))
        client.chmod(0o755)
        command = [python, __file__, address, str(os.getpid()), *imported]
        environment = os.environ | {"PYTHONPATH": path}
        environment.pop("TRITON_INTERPRET", None)
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as server:
            try:
                assert server.stdout is not None and server.stdout.readline() == b"ready\n"
                yield client
            finally:
                server.terminate()


def _serve(address: str, owner: int, imported: Sequence[str]) -> None:
    sys.path.pop(0)  # the folder of this file
    for name in imported:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        listener.settimeout(5.0)
        print("ready", flush=True)
        while _is_there(owner):
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            if os.fork() == 0:
                listener.close()
                os._exit(_watch(connection))
            connection.close()


def _is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _watch(connection: socket.socket) -> int:
    """Run a client's request in another fork, which may end in any way, and send its exit code to the client."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, files, _, _ = socket.recv_fds(connection, 4, 3)
    message = b""
    while len(message) < int.from_bytes(head, "big"):
        message += connection.recv(1 << 16)
    child = os.fork()
    if child == 0:
        for number, file in enumerate(files):
            os.dup2(file, number)
        os._exit(_run(*json.loads(message)))
    connection.sendall(bytes([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256]))
    return 0


def _run(arguments: list[str], folder: str, environment: dict[str, str]) -> int:
    """Do what a separate ``python`` would do with these arguments; return its exit code."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    first, *rest = arguments
    code = 0
    try:
        if first == "-m":
            sys.argv[1:] = rest[1:]
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif first == "-c":
            sys.argv[:] = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv[:] = arguments
            runpy.run_path(first, run_name="__main__")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
