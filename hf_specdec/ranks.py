"""A target that is spread over several ranks (tensor parallel): they must all feed it the same tokens.

What a drafter proposes may depend on the clock: an automatic window, a worker in the background, patience. So only one
rank, the leader, has a drafter at work in a call, and the others take over whatever it was told.
"""

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from .drafters.base import Draft, DraftContext, Drafter, Sequences, Verdict
from .guard import GuardedSession

T = TypeVar("T")

HEAD = 1024
"""bytes of the first broadcast of each message; most fit into it"""
SIZE = 8
"""bytes of it that say how long the message is"""


@dataclass(frozen=True)
class Ranks:
    """The ranks of one target."""

    group: Any
    """a gloo process group: what is shared is small and lies on the host"""

    @property
    def leads(self) -> bool:
        return dist.get_rank(self.group) == 0

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def share(self, value: T, device: torch.device | str = "cpu") -> T:
        """The leader's `value`, on every rank; what the others pass is ignored.

        Args:
            device: where tensors in it shall lie.
        """
        body = _pack(value) if self.leads else b""
        head = torch.zeros(HEAD, dtype=torch.uint8)
        start = len(body).to_bytes(SIZE, "little") + body[: HEAD - SIZE]
        head[: len(start)] = torch.frombuffer(bytearray(start), dtype=torch.uint8)
        dist.broadcast(head, group=self.group, group_src=0)
        size = int.from_bytes(head[:SIZE].numpy().tobytes(), "little")
        told = head[SIZE : SIZE + size]
        if size > HEAD - SIZE:
            rest = torch.zeros(size - (HEAD - SIZE), dtype=torch.uint8)
            if self.leads:
                rest = torch.frombuffer(bytearray(body[HEAD - SIZE :]), dtype=torch.uint8)
            dist.broadcast(rest, group=self.group, group_src=0)
            told = torch.cat([told, rest])
        return value if self.leads else _unpack(told.numpy().tobytes(), device)


_groups: dict[tuple[int, ...], Ranks] = {}


def ranks_of(target: PreTrainedModel) -> Ranks | None:
    """The ranks that a model was spread over by transformers; None where it lies on this one alone.

    The first call for a set of ranks is a collective one of theirs.
    """
    mesh = getattr(target, "_device_mesh", None)
    if mesh is None or mesh.size() < 2:
        return None
    members = tuple(mesh.mesh.flatten().tolist())
    if members not in _groups:
        # Where all ranks of the world take part, no rank outside has to be asked; elsewhere none is.
        group = dist.new_group(list(members), backend="gloo", use_local_synchronization=True)
        _groups[members] = Ranks(group)
    return _groups[members]


class SharedSession(GuardedSession):
    """The leader's guarded session, and on the other ranks its answers."""

    def __init__(self, ranks: Ranks, guard: type[GuardedSession], drafter: Drafter, context: DraftContext) -> None:
        self.ranks, self.context = ranks, context
        self.session: Any = "the leader's"
        self.own = guard(drafter, context) if ranks.leads else None
        self._answer(lambda own: None)

    def _answer(self, action: Callable[[Any], T]) -> T | None:
        """What the leader's session says, everywhere; None where the drafter was given up."""
        if self.session is None:
            return None
        own = self.own
        told = None if own is None else (action(own), own.session is not None)
        answer, alive = self.ranks.share(told, self.context.device)  # type: ignore[misc]
        self.session = self.session if alive else None
        return answer

    def ask(self, action: Callable[[Any], T]) -> T | None:
        """For schedules whose guard has more to ask."""
        return self._answer(lambda own: own.ask(action))

    def tell(self, action: Callable[[Any], object]) -> None:
        """What has no answer concerns the leader alone."""
        own: Any = self.own
        if own is not None:
            own.tell(action)

    def draft(self, sequences: Sequences, budget: list[int]) -> Draft:
        draft = self._answer(lambda own: own.draft(sequences, budget))
        return self._empty(sequences) if draft is None else draft

    def residual(self, row: int, node: int) -> Tensor | None:
        return self._answer(lambda own: own.residual(row, node))

    def observe(self, verdict: Verdict) -> None:
        self._answer(lambda own: own.observe(verdict))

    def drop(self, reason: str) -> None:
        """Called on every rank at once: they have all seen the same."""
        self.session = None
        if self.own is not None:
            self.own.drop(reason)

    def close(self) -> None:
        self.session = None
        if self.own is not None:
            self.own.close()


class _Pickler(pickle.Pickler):
    """Tensors travel on the CPU, views without the rest of what they look at."""

    def persistent_id(self, value: Any) -> Tensor | None:
        return value.detach().cpu().clone() if isinstance(value, Tensor) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, body: bytes, device: torch.device | str) -> None:
        super().__init__(io.BytesIO(body))
        self.device = device

    def persistent_load(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)


def _pack(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(value)
    return file.getvalue()


def _unpack(body: bytes, device: torch.device | str) -> Any:
    return _Unpickler(body, device).load()
