"""`NGramDrafter`: draws from a Kneser-Ney model over token ids (Leviathan et al. 2023, section 3.6 and Table 3).

A lookup costs next to nothing beside the target (c ≈ 0), and q is a true distribution, so sampling stays lossless.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...budget import Acceptance, Controller, Learned
from ...errors import SpeculationError
from ...hub.registry import register_drafter
from ...hub.tokenizer import check_same_ids
from ...protocol import DraftContext
from ...session import DraftSession
from ..base import Drafter
from ..chains import ChainSession
from ..rules import Planned
from ..trees import TreeSession
from .config import NGramConfig
from .model import NGramModel
from .steps import LikelyNGrams, NGramSteps

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@register_drafter
class NGramDrafter(Drafter):
    """Drafts from an n-gram model, trained by `hf-specdec train ngram` or `train.ngram.train_ngram`."""

    config_class = NGramConfig
    reads_prompt = False
    config: NGramConfig

    def __init__(self, model: NGramModel | None = None, **options: Any) -> None:
        """
        Args:
            model: as trained; sets `vocab_size` and `sizes`.
            options: of `NGramConfig`.

        Raises:
            SpeculationError: a bad option.
        """
        if model is not None:
            options |= {"vocab_size": model.vocab_size, "sizes": model.sizes}
        super().__init__(**options)
        self.model = model
        self.proposes_trees = self.config.num_draft_tokens == "auto"
        self._acceptance = Learned(Acceptance)

    def weights(self) -> dict[str, Tensor]:
        model = self.model or NGramModel.empty(self.config.vocab_size, self.config.sizes)
        return model.tensors()

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        self.model = NGramModel.from_tensors(weights)

    def check_target(self, target: "PreTrainedModel") -> None:
        if self.model is None:
            raise SpeculationError(
                "speculation_type='ngram' needs a trained model; train one with `hf-specdec train ngram` and "
                "pass it as assistant_model=Drafter.from_pretrained(folder) or speculation={'drafter': folder}"
            )
        vocab_size = target.config.get_text_config().vocab_size
        fix = "Train the drafter with the target's tokenizer: hf-specdec train ngram --tokenizer <the target>"
        if self.model.vocab_size > vocab_size:
            raise SpeculationError(
                f"the n-gram model has {self.model.vocab_size} token ids, more than the target's {vocab_size}. {fix}"
            )
        known = {"vocab_size": self.model.vocab_size} | (self.config.tokenizer or {})
        check_same_ids(known, target, "the n-gram model", fix)

    def start(self, context: DraftContext) -> DraftSession:
        if self.model is None:
            raise SpeculationError(
                "NGramDrafter needs a trained n-gram model as its first argument; train one with `hf-specdec train "
                "ngram`"
            )
        gamma = self.config.num_draft_tokens
        if gamma != "auto":
            context.stats.window = int(gamma)
        # Whatever is forbidden, and coupled draws, are known to the picker alone.
        if gamma != "auto" or context.do_sample or context.coupled or context.forbids is not None:
            experience = self._experience.of(context.target, (context.rows, context.do_sample))
            control = Controller(context, experience, None if gamma == "auto" else int(gamma), who="the n-gram model")
            return ChainSession(context, NGramSteps(context, self.model, control.cost), Planned(control))
        acceptance = self._acceptance.of(context.target)
        return TreeSession(context, acceptance, [LikelyNGrams(context, self.model, acceptance)])
