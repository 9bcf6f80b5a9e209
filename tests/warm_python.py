"""A `python` for `dvc repro`: each stage is a fork of one process, as imports take longer than tiny stages.

Run as a program, this is that process: it imports what all stages need, then serves the Unix socket that it is given.
"""

import contextlib
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

# What the stages import, in them or on the way, beside the code of the project.
_PRELOADED = (
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
    "matplotlib.pyplot",
    "scipy.optimize",
    "zarr",
    "numba",
    "recalkv.compression",
    "recalkv.evaluation.latency",
    "recalkv.runtime.models",
    "recalkv.text.windows",
)

# Started once a stage, so it imports next to nothing, and no site-packages.
_CLIENT = """#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    message = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [len(message).to_bytes(4, "big")], [0, 1, 2])
    server.sendall(message)
    sys.exit(int.from_bytes(server.recv(1), "big"))
"""


@contextlib.contextmanager
def warm_python(project: Path, bin_folder: Path) -> Iterator[None]:
    """While it lasts, ``bin_folder/python -m MODULE ...`` runs in such a fork, with the code of ``project``."""
    bin_folder.mkdir()
    # Addresses of sockets have at most some 100 characters, which a test's own folder may use up.
    with tempfile.TemporaryDirectory() as short:
        address, client = f"{short}/socket", bin_folder / "python"
        client.write_text(_CLIENT.format(python=Path(sys.executable).resolve(), address=address))
        client.chmod(0o755)
        command, environment = [sys.executable, __file__, address], os.environ | {"PYTHONPATH": str(project)}
        with subprocess.Popen(command, cwd=project, env=environment, stdout=subprocess.PIPE) as server:
            try:
                assert server.stdout is not None and server.stdout.readline() == b"ready\n"
                yield
            finally:
                server.terminate()


def _serve(address: str) -> None:
    sys.path.pop(0)  # the folder of the tests
    for name in _PRELOADED:
        importlib.import_module(name)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            child = os.fork()
            if child == 0:
                listener.close()
                os._exit(_run(connection))
            connection.sendall(bytes([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256]))
            connection.close()


def _run(connection: socket.socket) -> int:
    """Run what a client asks for in this process, on its files; the exit code."""
    head, files, _, _ = socket.recv_fds(connection, 4, 3)
    message = b""
    while len(message) < int.from_bytes(head, "big"):
        message += connection.recv(1 << 16)
    (flag, module, *arguments), folder, environment = json.loads(message)
    assert flag == "-m"
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    _serve(sys.argv[1])
