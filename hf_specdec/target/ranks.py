"""A target that is spread over several ranks (tensor parallel): the group they form, and how they share a value."""

import io
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
        head = torch.zeros(HEAD, dtype=torch.uint8, device="cpu")
        start = len(body).to_bytes(SIZE, "little") + body[: HEAD - SIZE]
        head[: len(start)] = torch.frombuffer(bytearray(start), dtype=torch.uint8)
        dist.broadcast(head, group=self.group, group_src=0)
        size = int.from_bytes(head[:SIZE].numpy().tobytes(), "little")
        told = head[SIZE : SIZE + size]
        if size > HEAD - SIZE:
            rest = torch.zeros(size - (HEAD - SIZE), dtype=torch.uint8, device="cpu")
            if self.leads:
                rest = torch.frombuffer(bytearray(body[HEAD - SIZE :]), dtype=torch.uint8)
            dist.broadcast(rest, group=self.group, group_src=0)
            told = torch.cat([told, rest])
        return value if self.leads else _unpack(told.numpy().tobytes(), device)


_groups: dict[tuple[int, ...], Ranks] = {}


def ranks_of(target: "PreTrainedModel") -> Ranks | None:
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
