"""`Drafter`: what every way of drafting has in common. It lives long: its config, and its weights if it has any."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from ..hub import load_drafter, push_drafter, save_drafter
from ..protocol import DraftContext, DraftSession
from ..registry import Storable
from ..schedule import Guarded, Schedule
from ..stats import SpeculationStats

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Drafter(Storable):
    """A way of drafting: config, weights, and a `start` that opens a session per `generate` call."""

    proposes_trees: bool = False
    """whether sessions may propose drafts with `parents`"""
    brings_runner: bool = False
    """whether sessions bring a runner of their own (`DraftSession.runner`)"""

    def __init__(self, **options: Any) -> None:
        self.config = self.config_class.from_options(options)
        self.last_stats: SpeculationStats | None = None

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={getattr(self.config, name)!r}" for name in self.config.options())
        return f"{type(self).__name__}({options})"

    @abstractmethod
    def start(self, context: DraftContext) -> DraftSession:
        """Open a session for one `generate` call, before the prompt's forward."""

    def check_target(self, target: "PreTrainedModel") -> None:
        """Raise `SpeculationError` if this drafter cannot serve the target. Called before any forward."""

    def takes_ragged(self) -> bool:
        """Whether sessions can serve rows of uneven lengths."""
        return True

    def schedule(self, session: Guarded, context: DraftContext) -> Schedule | None:
        """An order of its own for drafting and verifying in a call; None for one after the other."""
        return None

    @classmethod
    def from_pretrained(cls, repo_or_folder: str, **kwargs: Any) -> "Drafter":
        """Load from a Hub repo or a local folder; the class follows from `drafter_type` in its `config.json`.

        See `hf_specdec.hub.load_drafter` for what `kwargs` may hold.
        """
        return load_drafter(cls, repo_or_folder, **kwargs)

    def save_pretrained(
        self, folder: str, *, push_to_hub: bool = False, repo_id: str | None = None, **kwargs: Any
    ) -> None:
        """Write `config.json`, weights if there are any, and a model card (see `hf_specdec.hub.save_drafter`).

        Args:
            push_to_hub: upload the folder afterwards to `repo_id` (default: the folder's name); `kwargs` may then also
                hold what `push_to_hub` takes.
        """
        save_drafter(self, folder, push_to_hub=push_to_hub, repo_id=repo_id, **kwargs)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> str:
        """Upload to the Hub (see `hf_specdec.hub.push_drafter`); returns the commit's address."""
        return push_drafter(self, repo_id, **kwargs)
