"""The wire between two ranks: a TCP connection, which only who knows a secret gets."""

import hmac
import json
import secrets
import socket
import struct

import torch.distributed as dist

from ....clock import Deadline, now
from ....errors import SpeculationError
from ....target.probe import Support
from .wire import Link

PATIENCE = 600.0
"""seconds for all ranks to get as far as creating their drafter"""
KNOCK = 10.0
"""seconds for whoever connects to say the secret"""
SECRET = 32
"""bytes"""
TIME = struct.Struct("<d")


def listen(shelf: dist.Store, can: Support, master: tuple[str, int]) -> Link:
    """On the drafting rank: say where it is found, and wait for the leading one.

    Args:
        shelf: where the ranks meet.
        can: what the draft model supports.
        master: host and port of the launch, to find the network by.

    Raises:
        SpeculationError: the leading rank has not come.
    """
    secret = secrets.token_bytes(SECRET)
    family, host = address_towards(*master)
    with socket.create_server((host, 0), family=family) as listener:
        card = {"host": host, "port": listener.getsockname()[1], "secret": secret.hex(), "support": int(can)}
        shelf.set("card", json.dumps(card))
        end = admit(listener, secret, PATIENCE)
    end.sendall(TIME.pack(now()))
    _tune(end)
    return Link(end)


def connect(card: dict) -> Link:
    """On the leading rank: call the drafting one, which has left this card."""
    end = socket.create_connection((card["host"], card["port"]), timeout=PATIENCE)
    end.sendall(bytes.fromhex(card["secret"]))
    ahead = clock_ahead(end)
    _tune(end)
    link = Link(end)
    link.ahead = ahead
    return link


def address_towards(host: str, port: int) -> tuple[socket.AddressFamily, str]:
    """This host's own address in the network in which it sees another host; nothing is sent."""
    problem: OSError | None = None
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, socket.SOCK_DGRAM) as end:
            try:
                end.connect(address)
            except OSError as error:
                problem = error
            else:
                return family, end.getsockname()[0]
    raise SpeculationError(f"MASTER_ADDR {host!r} cannot be reached from here: {problem}")


def admit(listener: socket.socket, secret: bytes, patience: float) -> socket.socket:
    """The first connection that presents the secret. Nothing else that is sent is looked at."""
    deadline = Deadline(patience)
    while not deadline.over:
        listener.settimeout(deadline.left)
        try:
            end, _ = listener.accept()
        except (TimeoutError, BlockingIOError):
            break
        end.settimeout(min(KNOCK, deadline.left))
        try:
            if hmac.compare_digest(read(end, len(secret)), secret):
                return end
        except OSError:
            pass
        end.close()
    raise SpeculationError(
        f"rank 0, the target's leading one, has not connected to the drafting rank within {patience} seconds; "
        'it must call PearlDrafter(draft_model, worker="rank").join(), too, and be able to reach this host'
    )


def clock_ahead(end: socket.socket) -> float:
    """Seconds that the other side's clock is ahead, by the time that it tells; off by how long the message takes."""
    (theirs,) = TIME.unpack(read(end, TIME.size))
    return theirs - now()


def read(end: socket.socket, size: int) -> bytes:
    """So many bytes."""
    body = b""
    while len(body) < size:
        if not (part := end.recv(size - len(body))):
            raise ConnectionError("the other rank has hung up")
        body += part
    return body


def _tune(end: socket.socket) -> None:
    """Send small messages at once, and notice within a minute or so that a host has vanished."""
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6), ("TCP_USER_TIMEOUT", 60_000)):
        if hasattr(socket, name):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
