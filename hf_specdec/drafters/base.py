"""`Drafter`: what every way of drafting has in common. It lives long: its config, and its weights if it has any."""

import copy
import inspect
from abc import abstractmethod
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from ..budget import DraftCost, Experience, Learned
from ..errors import SpeculationError
from ..hub import load_drafter, push_drafter, save_drafter
from ..hub.registry import Storable
from ..options import section, signature
from ..protocol import DraftContext
from ..schedule import Guarded, Schedule
from ..session import DraftSession
from ..stats import SpeculationStats

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class Drafter(Storable):
    """A way of drafting: config, weights, and a `start` that opens a session per `generate` call.

    A constructor names what is no option, and passes `**options` on to this one. The class's signature and docstring
    say which there are, as the config describes them.
    """

    proposes_trees: bool = False
    """whether sessions may propose drafts with `parents`"""
    brings_runner: bool = False
    """whether sessions bring a runner of their own (`DraftSession.runner`)"""
    recordable: bool = False
    """whether that runner's forwards can be recorded: they go through `RaggedRunner.over`"""

    because: str = ""
    """why it was chosen, for the statistics; empty where it was named"""

    reads_prompt: bool = True
    """whether sessions need the prompt's token ids; others draft from what is generated where it is `inputs_embeds`"""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        described = cls.config_class.fields()
        cls.__signature__ = signature(cls.__init__, described)  # type: ignore[attr-defined]
        cls.__doc__ = "\n\n".join(filter(None, [inspect.cleandoc(cls.__doc__ or ""), section(described)]))

    def __init__(self, **options: Any) -> None:
        self.config = self.config_class.from_options(options)
        self._experience = Learned(Experience)  # what a call has measured serves the next one
        self.last_stats: SpeculationStats | None = None
        """what the last call accepted, cost and gained; None before the first"""

    @property
    def generation_config(self) -> SimpleNamespace:
        """Whisper's own `generate` leaves a mark in the generation config of what drafts for it; nobody reads it."""
        return SimpleNamespace()

    @property
    def device(self) -> Any:
        """Asked for by transformers' own assisted generation alone, which takes models.

        Raises:
            SpeculationError: always.
        """
        raise SpeculationError(
            f"transformers' own generate was given a {type(self).__name__}: hf_specdec's layer around it is not there, "
            "since unregister() was called or another library took it away; call hf_specdec.register(), and generate "
            "again"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have the options and weights; what was learned of a target, or is running, stays here."""
        return vars(self) | {"last_stats": None}

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={getattr(self.config, name)!r}" for name in self.config.options())
        return f"{type(self).__name__}({options})"

    @abstractmethod
    def start(self, context: DraftContext) -> DraftSession:
        """Open a session for one `generate` call, before the prompt's forward."""

    def for_target(self, target: "PreTrainedModel") -> "Drafter":
        """Who drafts for this target: itself. `AutoDrafter` chooses somebody."""
        return self

    def check_target(self, target: "PreTrainedModel") -> None:
        """Raise `SpeculationError` if this drafter cannot serve the target. Called before any forward."""

    def why_not(self, prompt_ids: "torch.Tensor", source: dict[str, Any] | None) -> str:
        """Why sessions could draft nothing in a call, which is then decoded plainly; empty where they can.

        Args:
            prompt_ids: [B, P] without columns where the prompt is `inputs_embeds` alone.
            source: as of `DraftContext.source`.
        """
        known = prompt_ids.shape[1] > 0 or not self.reads_prompt
        return "" if known else f"{type(self).__name__} needs token ids, and the prompt is inputs_embeds"

    def untaught(self) -> Self:
        """The same drafter, over the same weights, that knows of no target and no text."""
        made = copy.copy(self)
        taught = {name: value for name, value in vars(made).items() if getattr(value, "is_taught", False)}
        vars(made).update({name: copy.copy(value) for name, value in taught.items()})
        return made

    def draft_cost(self, target: "PreTrainedModel", rows: int, do_sample: bool, is_set: bool) -> DraftCost:
        """What its steps take in calls of so many rows.

        Args:
            is_set: whether that is set to something, or observed.
        """
        experience = self._experience.of(target, (rows, do_sample))
        if experience.cost.is_set and not is_set:
            experience.cost = DraftCost()
        return experience.cost

    def takes_ragged(self) -> bool:
        """Whether sessions can serve rows of uneven lengths."""
        return True

    def schedule(self, session: Guarded, context: DraftContext) -> Schedule | None:
        """An order of its own for drafting and verifying in a call; None for one after the other."""
        return None

    @classmethod
    def from_pretrained(cls, repo_or_folder: str | Path, *, draft_model: Any = None, **options: Any) -> Self:
        """Load from a Hub repo or a local folder; the class follows from `drafter_type` in its `config.json`.

        Args:
            repo_or_folder: a local folder, else a repo on the Hub.
            draft_model: use this model, or a `Translated` one, instead of the one that the config names.
            options: any of these, and options of this kind of drafter in place of the stored ones:

                - `subfolder`: where the drafter is inside of it.
                - `revision`: branch, tag or commit of the repo.
                - `token`: for private repos; None uses the stored login.
                - `cache_dir`, `force_download`, `local_files_only`: as in `huggingface_hub`.
                - `device_map`, `dtype`: of the draft model; the dtype "auto" (default) is the stored one.
                - `quantization`: of the draft model: "int8" or "int4" (optimum-quanto).
                - `pack_linear`: whether the draft model's weights are packed, on a CPU; see `hf_specdec.pack_linear`.
                - `trust_remote_code`: whether the *draft model* may bring modeling code. The drafter itself never does.

        Raises:
            SpeculationError: whatever is wrong with the repo; the message names the file and the fix.
        """
        return load_drafter(cls, repo_or_folder, draft_model=draft_model, **options)

    def save_pretrained(
        self, folder: str | Path, *, push_to_hub: bool = False, repo_id: str | None = None, **options: Any
    ) -> None:
        """Write `config.json`, weights if there are any, and a model card.

        Args:
            folder: made if it is not there.
            push_to_hub: upload the folder afterwards.
            repo_id: the repo to upload to; the folder's name if left out.
            options: any of these:

                - `target`: the model that the drafter is made for; others are then refused. None keeps what the config
                  says.
                - `tokenizer`: the target's; its hash is stored too.
                - `embed_draft_model`: True copies the draft model's weights into a subfolder; False names where it was
                  loaded from: its Hub repo at that revision, or a folder beside `folder`. None (default) embeds, unless
                  the drafter was loaded with one of these named.
                - `license`: for the card, as the Hub names it, such as "apache-2.0".
                - `datasets`: for the card, ids of data sets on the Hub that the drafter was trained on.
                - `trained_on`: for the card, a sentence on the training.
                - `results`: for the card, a result file of `hf-specdec bench`.
                - `private`: visibility of a repo that is made; None is the account's default. This and what follows is
                  for an upload.
                - `revision`: branch to push to, made if it is not there; None is the main one.
                - `commit_message`: of the first commit.
                - `create_pr`: open a pull request instead of changing the branch.
                - `token`: None uses the stored login.

        Raises:
            SpeculationError: what cannot be saved as asked, or options of an upload without `push_to_hub`.
        """
        save_drafter(self, folder, push_to_hub=push_to_hub, repo_id=repo_id, **options)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload to the Hub.

        Args:
            repo_id: made if it is not there.
            options: as of `save_pretrained`.

        Returns:
            The address of the last commit.

        Raises:
            SpeculationError: what cannot be saved as asked, or the Hub refuses.
        """
        return push_drafter(self, repo_id, **options)
