"""A Python that has imported torch and transformers already: a process of the tests starts in 0.1 s, not in six.

`executable()` hands its arguments, environment and files to a server, which forks: what runs then is what a new process
would run, with its group, its signals and its exit status. Not for tests of what is imported, nor of variables that are
read on import; and the process that a `Popen` knows is the one in front.
"""

import fcntl
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import types
from contextlib import suppress
from functools import cache

from processes import folder_of_the_session

FRONT = """#!{python} -IS
import json, os, signal, socket, sys, time
files = [int(name) for name in os.listdir("/proc/self/fd")]
files = [number for number in files if os.path.exists(f"/proc/self/fd/{{number}}")]
link = socket.socket(socket.AF_UNIX)
while link.connect_ex({address!r}):
    try:
        os.close(os.open({address!r} + ".starts", os.O_CREAT | os.O_EXCL))
        if os.fork() == 0:
            os.setpgid(0, 0)
            for number in (0, 1, 2):
                os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.closerange(3, 1024)
            os.execve({python!r}, [{python!r}, {server!r}, {address!r}, {owner!r}], {env!r})
    except FileExistsError:
        time.sleep(0.02)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: link.sendall(bytes([number])))
about = dict(files=files, arguments=sys.argv[1:], env=dict(os.environ), folder=os.getcwd(), group=os.getpgrp())
socket.send_fds(link, [b"."], files)
link.sendall(json.dumps(about).encode() + b"\\n")
status = int(link.makefile().readline() or 1)
if status < 0:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@cache
def executable() -> str:
    """Its path. The server starts with the first process that is asked for, and ends with this one."""
    folder = folder_of_the_session()
    front, python, owner = folder / "python", sys.executable, str(os.getpid())
    address = str(folder / "address")
    front.write_text(FRONT.format(python=python, address=address, server=__file__, owner=owner, env=dict(os.environ)))
    front.chmod(0o755)
    return str(front)


def serve(address: str, owner: int) -> dict:
    """Fork for whoever connects. What comes back is what a fork is to run."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    ended = os.pidfd_open(owner)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen()
        while True:
            if ended in select.select([door, ended], [], [])[0]:
                os._exit(0)
            link, _ = door.accept()
            if os.fork() == 0:
                break
            link.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.close(ended)
    received = socket.recv_fds(link, 1, 64)[1]
    about = json.loads(link.makefile().readline()) | {"received": received}
    if child := os.fork():
        keep(child, link, received)
    link.close()
    return about


def keep(child: int, link: socket.socket, received: list[int]) -> None:
    """Between a process and its front: signals go in, its status comes out, and it does not outlive the front."""
    for number in received:
        os.close(number)
    ended = os.pidfd_open(child)
    while ended not in select.select([ended, link], [], [])[0]:
        if not (signals := link.recv(16)):
            os.kill(child, signal.SIGKILL)
            break
        for number in signals:
            os.kill(child, number)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(OSError):
        link.sendall(b"%d\n" % status)
    os._exit(0)


def become(files: list[int], received: list[int], arguments: list[str], env: dict, folder: str, group: int) -> None:
    """Run as the process in front would."""
    above = [fcntl.fcntl(number, fcntl.F_DUPFD, 256) for number in received]
    os.closerange(3, 256)
    for number, kept in zip(files, above, strict=True):
        os.dup2(kept, number)
        os.close(kept)
    os.setpgid(0, group)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    sys.orig_argv = [sys.executable, *arguments]
    while arguments[0] not in ("-c", "-m"):
        arguments = arguments[1:]
    kind, what, *rest = arguments
    sys.path[:0] = ["" if kind == "-c" else folder, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = [kind if kind == "-c" else what, *rest]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(compile(what, "<string>", "exec"), vars(main))


if __name__ == "__main__":
    del sys.path[0]
    import torch  # noqa: F401
    import transformers.generation
    import transformers.modeling_utils
    import transformers.models.auto  # noqa: F401

    gc.collect()
    gc.freeze()
    become(**serve(sys.argv[1], int(sys.argv[2])))
