"""A draft model on the last rank of a launch, before a target on the others.

The ranks meet in the launcher's store (MASTER_ADDR, MASTER_PORT). The last one then leaves the launch: transformers
spreads a target over all ranks of the process group that it finds, so this group has the target's ranks only. The
target's leading rank and the drafting one are connected by TCP.
"""

import json
import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from accelerate import PartialState

from ....errors import SpeculationError, warn
from ....target.probe import Support, support
from ....target.ranks import Ranks
from .serving import serve
from .tcp import PATIENCE, connect, listen
from .wire import Link
from .workers import Worker, Workers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...draft_model import Translated

LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""what launchers tell a rank"""
HOW = (
    "start the script on every host with a launcher, for example `torchrun --nproc_per_node 2 script.py` or "
    "`accelerate launch --multi_gpu --num_processes 2 script.py`"
)

_joined = False


class Seat(Workers):
    """What this process is in a launch. On the target's leading rank the drafting one is the only worker."""

    def __init__(self, rank: int, targets: int, support: Support, link: Link | None = None) -> None:
        """
        Args:
            targets: how many ranks the target has.
            support: of the draft model, as its own rank has found out.
            link: the drafting rank's end of the wire.
        """
        super().__init__()
        self.rank, self.targets, self.support, self.link = rank, targets, support, link
        self.closed = False

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

    def take(self, draft: "PreTrainedModel | Translated", target: torch.device) -> Worker:
        if (worker := self.reuse()) is None:
            raise ConnectionError("the drafting rank is gone, or busy with another call")
        return self.lend(worker)

    def close(self) -> None:
        """The drafting rank's `serve` ends."""
        self.closed = True
        if self.link is not None:
            self.link.close()
        super().close()

    def serve(self, draft: "PreTrainedModel | Translated") -> None:
        """Draft until the target's ranks have closed. An end that they did not intend is a warning: an error here
        would make the launcher end the ranks that go on without a draft."""
        link, self.link = self.link, None
        if link is None:
            raise SpeculationError(
                f"serve() must be called once, on the drafting rank, which is rank {self.targets}, and this is "
                f"rank {self.rank}. Check drafter.drafts first, and call generate where it is False"
            )
        ended = serve(link, draft)
        if ended.error:
            warn(
                f"the drafting rank stops, because it raised {ended.error}. The text is not affected: the target's "
                "ranks finish it without drafts"
            )
        elif ended.in_call:
            warn("the drafting rank stops: the target's leading rank closed the connection in the middle of a call")


def join(draft_model: "PreTrainedModel") -> Seat:
    """Take this process's place in the launch. All ranks do so at once.

    On the target's ranks `draft_model` is not looked at. Afterwards accelerate's process group has these ranks.

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
        link = listen(shelf, can, (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        for name in LAUNCH:
            os.environ.pop(name, None)
        return Seat(rank, ranks - 1, can, link)
    try:
        card = json.loads(shelf.get("card"))
    except dist.DistStoreError as error:
        raise SpeculationError(
            f"rank {ranks - 1}, the drafting one, has not created its drafter within {PATIENCE} seconds; call "
            'PearlDrafter(draft_model, worker="rank").join() on every rank, the last one too'
        ) from error
    seat = Seat(rank, ranks - 1, Support(card["support"]))
    if rank == 0:
        wire = connect(card)
        seat.free.append(Worker(wire, wire.close))
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
