"""`HeadDrafter`: what drafters with heads have in common."""

from abc import abstractmethod
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import PreTrainedConfig

from ...budget import MOST_NODES, Controller, DraftCost
from ...errors import SpeculationError
from ...hub.draft import load_draft
from ...protocol import DraftContext
from ...session import DraftSession
from ...transfer import waits
from ..base import Drafter
from ..chains import ChainSession, candidates_of
from ..rules import Planned
from ..trees import TreeSession
from .head import Head
from .steps import HeadSteps

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CANDIDATES = 4
"""tokens thought of at each place of a greedy draft, of which those are verified that pay"""


class HeadDrafter(Drafter):
    """Drafts with heads that read the target's hidden states."""

    proposes_trees = True
    who = "the head"
    """drafts, in notes"""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)

    @abstractmethod
    def head(self, context: DraftContext) -> Head:
        """The head, for one call."""

    def steps(self, context: DraftContext, cost: DraftCost, candidates: int | None = None) -> HeadSteps:
        """The head, as a session asks it.

        Args:
            cost, candidates: as of `HeadSteps`.
        """
        return HeadSteps(context, self.head(context), self.config.drafter_type, cost, candidates)

    def start(self, context: DraftContext) -> DraftSession:
        experience = self._experience.of(context.target, (context.rows, context.do_sample))
        if context.do_sample:  # a chain in every round: a seed gives one text
            steps = self.steps(context, experience.cost)
            return ChainSession(context, steps, Planned(Controller(context, experience, steps.head.most, who=self.who)))
        k = candidates_of(context, CANDIDATES)
        steps = self.steps(context, experience.cost, k)
        control = Controller(context, experience, candidates=k, who=self.who)
        seen = not (waits(context.device) or steps.recorded is not None)
        return TreeSession(context, control.acceptance, (), steps, control, seen, MOST_NODES)


class PublishedHeadDrafter(HeadDrafter):
    """Drafts with a head that is a model by itself, which others publish. A kind of them says what it `takes`."""

    needs_draft_model = True
    what: ClassVar[str]
    """is drafted with, for messages"""
    format: ClassVar[str | None] = None
    """The module beside this one whose `FORMAT` reads published files, and which is imported when there are some:
    models' code takes longer to import than all of this package. None where transformers reads them."""

    def __init__(self, draft_model: "PreTrainedModel", **options: Any) -> None:
        """
        Args:
            draft_model: the head. `Drafter.from_pretrained(name)` loads published ones.
            options: see the config.

        Raises:
            SpeculationError: a bad option, or a model that is no such head.
        """
        super().__init__(**options)
        if not self.takes(draft_model):
            raise SpeculationError(
                f"draft_model {type(draft_model).__name__} is not {self.what}; load one with "
                "Drafter.from_pretrained(), or use DraftModelDrafter"
            )
        self.draft_model: Any = draft_model

    @classmethod
    def load_model(cls, folder: Path, *, quantization: str | None = None, **loading: Any) -> "PreTrainedModel":
        """Such a model, from its folder; options as of `load_draft`.

        Raises:
            SpeculationError: it cannot be read, or a quantization is asked for.
        """
        if quantization is not None:
            raise SpeculationError(f"quantization={quantization!r} is for draft models; {cls.what} is small: leave it")
        if cls.format is None:
            return load_draft(folder, **loading)
        return import_module(f".{cls.format}", __package__).FORMAT.load(folder, cls.what, **loading)  # type: ignore[no-any-return]

    def check_fits(
        self,
        target: "PreTrainedModel",
        config: PreTrainedConfig,
        *,
        width: int,
        states: Sequence[int] = (),
        token: int = 0,
        wrong: str = "",
    ) -> None:
        """Refuse a target that the head was not trained for.

        Args:
            config: of the head's layers.
            width: of the hidden states that it reads.
            states: which these are, 0 the embeddings.
            token: the last one of those that it knows.
            wrong: what else about it does not fit, if anything.

        Raises:
            SpeculationError: says what does not fit.
        """
        theirs = target.config.get_text_config(decoder=True)
        count, size, vocab = theirs.num_hidden_layers, theirs.hidden_size, theirs.vocab_size
        if width != size:
            wrong = f"reads states of width {width}"
        elif not all(0 <= state <= count for state in states):
            wrong = f"reads hidden states {list(states)}"
        elif token >= vocab:
            wrong = f"knows token {token}"
        verifier = getattr(self.draft_model, "verifier", None)
        if verifier is not None and not wrong:
            wrong = "was trained for a model with another last norm" if verifier.is_other(target) else ""
            verifier.look_at(target, self.what)
        if wrong:
            raise SpeculationError(
                f"draft_model is {self.what} that {wrong}, and {type(target).__name__} has {count} layers of width "
                f"{size} and {vocab} tokens; use the target that it was trained for"
            )
        check_attention(config)


def check_attention(config: PreTrainedConfig) -> None:
    """Refuse kernels that do not take masks of rows of different lengths.

    Raises:
        SpeculationError: with what to load the heads with.
    """
    kind = config._attn_implementation
    if kind not in (None, "eager", "sdpa"):
        raise SpeculationError(
            f"the heads use {kind!r} attention, which does not support rows of different lengths; load their "
            'model with attn_implementation="sdpa"'
        )
