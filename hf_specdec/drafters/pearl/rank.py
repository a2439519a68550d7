"""PEARL across processes and hosts: of the ranks of a launch the last one drafts, the others are the target's.

The ranks meet in the launcher's store (MASTER_ADDR, MASTER_PORT). The last one then leaves the launch: transformers
spreads a target over all ranks of the process group that it finds, so this group has the target's ranks only. Between
the leading rank of the target and the drafting one lies a TCP connection, the same line as to any other worker.
"""

import hmac
import json
import os
import secrets
import socket
import struct
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from accelerate import PartialState

from ...clock import Deadline, now
from ...errors import SpeculationError, warn
from ...target.probe import Support, support
from ...target.ranks import Ranks
from .link import LARGEST_ANSWER, STEP, Kind, Link
from .worker import serve
from .workers import Worker

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..draft_model import Translated

PATIENCE = 600.0
"""seconds for all ranks to get as far as making their drafter"""
KNOCK = 10.0
"""seconds for whoever connects to say the secret"""
SECRET = 32
"""bytes"""
PINGS = 16
TIME = struct.Struct("<d")
LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""what launchers tell a rank"""
HOW = (
    "start the script on every host with a launcher, for example `torchrun --nproc_per_node 2 script.py` or "
    "`accelerate launch --multi_gpu --num_processes 2 script.py`"
)

_joined = False


@dataclass
class Seat:
    """What this process is in a launch."""

    rank: int
    targets: int
    """how many ranks the target has"""
    support: Support
    """of the draft model, as its own rank has found out"""
    line: "DraftersLine | None" = None
    """the drafting rank's end of the line"""
    worker: Worker | None = None
    """the leading rank's end of it"""
    closed: bool = False

    @property
    def drafts(self) -> bool:
        return self.rank == self.targets

    def check(self, ranks: Ranks | None) -> None:
        """Refuse a `generate` call that cannot be served from here; `ranks` are those of its target.

        Raises:
            SpeculationError: it says which rank does what.
        """
        if self.drafts:
            raise SpeculationError(
                f"this is rank {self.rank}, which drafts: call drafter.serve() here, and generate where drafter.drafts "
                "is False"
            )
        if self.closed:
            raise SpeculationError("this drafter was closed, and its drafting rank has ended; start the launch again")
        if self.targets > 1 and (ranks is None or ranks.size != self.targets):
            raise SpeculationError(
                f"the launch has {self.targets} ranks for the target, and this target is on "
                f"{1 if ranks is None else ranks.size}; create the drafter first, then load the target over all "
                'of them: from_pretrained(name, distributed_config=DistributedConfig(tp_plan="auto"))'
            )

    def close(self) -> None:
        self.closed = True
        if self.line is not None:
            self.line.close()

    def serve(self, draft: "PreTrainedModel | Translated") -> None:
        """Draft until the target's ranks have closed. An end that they did not intend is a warning: an error here
        would make the launcher end the ranks that go on without a draft."""
        line, self.line = self.line, None
        if line is None:
            raise SpeculationError(
                f"serve() must be called once, on the drafting rank, which is rank {self.targets}, and this is "
                f"rank {self.rank}. Check drafter.drafts first, and call generate where it is False"
            )
        serve(line, draft)
        if line.error:
            warn(
                f"the drafting rank stops, because it raised {line.error}. The text is not affected: the target's "
                "ranks finish it without drafts"
            )
        elif line.in_call:
            warn("the drafting rank stops: the target's leading rank closed the connection in the middle of a call")


class DraftersLine(Link):
    """The drafting rank's end, which remembers how things stand."""

    in_call = False
    error = ""

    def receive(self, timeout: float | None = None) -> tuple[Kind, bytes] | None:
        message = super().receive(timeout)
        if message is not None and message[0] in (Kind.OPEN, Kind.CLOSE):
            self.in_call = message[0] is Kind.OPEN
        return message

    def send(self, kind: Kind, body: bytes = b"") -> None:
        if kind is Kind.ERROR:
            self.error = body.decode(errors="replace")
        super().send(kind, body)


class LeadersLine(Link):
    """The leading rank's end, which tells the times of draft steps by the clock of this host."""

    ahead = 0.0
    """seconds that the drafting rank's clock is ahead"""

    def receive(self, timeout: float | None = None) -> tuple[Kind, bytes] | None:
        message = super().receive(timeout)
        if message is None or message[0] is not Kind.STEP or len(message[1]) < STEP.size:
            return message
        epoch, calls, began, ended = STEP.unpack_from(message[1])
        body = STEP.pack(epoch, calls, began - self.ahead, ended - self.ahead) + message[1][STEP.size :]
        return Kind.STEP, body


def join(draft_model: "PreTrainedModel", patience: float) -> Seat:
    """Take this process's place in the launch. All ranks do so at once.

    On the target's ranks `draft_model` is not looked at; afterwards accelerate's process group has these ranks.

    Args:
        patience: seconds after which the leading rank takes a message that the drafting one does not for an error.

    Raises:
        SpeculationError: there is no launch of 2 ranks or more, or it is taken.
    """
    global _joined
    rank, ranks = _launched()
    store, _, _ = next(dist.rendezvous("env://", rank, ranks, timeout=timedelta(seconds=PATIENCE)))
    shelf = dist.PrefixStore("hf_specdec", store)
    _joined = True
    if rank == ranks - 1:
        can = support(draft_model)
        line = _listen(shelf, can)
        for name in LAUNCH:
            os.environ.pop(name, None)
        return Seat(rank, ranks - 1, can, line=line)
    try:
        card = json.loads(shelf.get("card"))
    except dist.DistStoreError as error:
        raise SpeculationError(
            f"rank {ranks - 1}, the drafting one, has not created its drafter within {PATIENCE} seconds; call "
            'PearlDrafter(draft_model, worker="rank").join() on every rank, the last one too'
        ) from error
    seat = Seat(rank, ranks - 1, Support(card["support"]))
    if rank == 0:
        link = _connect(card, patience)
        seat.worker = Worker(link, link.close)
    os.environ["WORLD_SIZE"] = str(ranks - 1)
    PartialState(cpu=_on_cpu())
    return seat


def _launched() -> tuple[int, int]:
    """This process's rank and how many there are."""
    if _joined:
        raise SpeculationError(
            'worker="rank" allows one drafter per launch, and this process has created one; reuse it, or start '
            "a new launch"
        )
    if dist.is_initialized():
        raise SpeculationError(
            'worker="rank": this process has a process group already, and the drafting rank must stay out of '
            "it; create the drafter before you load the target, and before anything else of accelerate or "
            "torch.distributed"
        )
    told = {name: os.environ.get(name) for name in LAUNCH if name != "LOCAL_WORLD_SIZE"}
    if missing := [name for name, value in told.items() if not value]:
        raise SpeculationError(f'worker="rank" needs a launch of 2 ranks or more, and {missing[0]} is not set; {HOW}')
    if (ranks := int(told["WORLD_SIZE"] or 1)) < 2:
        raise SpeculationError(f'worker="rank" needs a launch of 2 ranks or more, got WORLD_SIZE={ranks}; {HOW}')
    return int(told["RANK"] or 0), ranks


def _on_cpu() -> bool:
    asked = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    return asked or not torch.accelerator.is_available()


# ---------------------------------------------------------------------- the line


def _listen(shelf: dist.Store, can: Support) -> DraftersLine:
    """Say where the drafting rank is found, and wait for the leading one."""
    secret = secrets.token_bytes(SECRET)
    family, host = _address_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    with socket.create_server((host, 0), family=family) as listener:
        card = {"host": host, "port": listener.getsockname()[1], "secret": secret.hex(), "support": int(can)}
        shelf.set("card", json.dumps(card))
        end = _admit(listener, secret, PATIENCE)
    for _ in range(PINGS):
        _read(end, 1)
        end.sendall(TIME.pack(now()))
    _tune(end)
    return DraftersLine(end)


def _connect(card: dict, patience: float) -> LeadersLine:
    end = socket.create_connection((card["host"], card["port"]), timeout=PATIENCE)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.sendall(bytes.fromhex(card["secret"]))
    link = LeadersLine(end, patience, LARGEST_ANSWER)
    link.ahead = _clock_ahead(end)
    _tune(end)
    return link


def _address_towards(host: str, port: int) -> tuple[socket.AddressFamily, str]:
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


def _admit(listener: socket.socket, secret: bytes, patience: float) -> socket.socket:
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
            if hmac.compare_digest(_read(end, len(secret)), secret):
                return end
        except OSError:
            pass
        end.close()
    raise SpeculationError(
        f"rank 0, the target's leading one, has not connected to the drafting rank within {patience} seconds; "
        'it must call PearlDrafter(draft_model, worker="rank").join(), too, and be able to reach this host'
    )


def _clock_ahead(end: socket.socket) -> float:
    """Seconds that the other side's clock is ahead: as it answered in the middle of the shortest of some pings."""
    found = []
    for _ in range(PINGS):
        asked = now()
        end.sendall(b"?")
        (theirs,) = TIME.unpack(_read(end, TIME.size))
        heard = now()
        found.append((heard - asked, theirs - (asked + heard) / 2))
    return min(found)[1]


def _read(end: socket.socket, size: int) -> bytes:
    body = b""
    while len(body) < size:
        if not (part := end.recv(size - len(body))):
            raise ConnectionError("the other rank has hung up")
        body += part
    return body


def _tune(end: socket.socket) -> None:
    """Small messages at once; a host that vanishes is noticed within a minute or so."""
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6), ("TCP_USER_TIMEOUT", 60_000)):
        if hasattr(socket, name):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
