"""`DiscoDrafter`: after every drafted token a classifier decides whether to draft one more (Mamou 2024, §3)."""

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...budget import MOST_NODES, Controller, DraftCost
from ...errors import SpeculationError
from ...hub.registry import register_drafter
from ...protocol import DraftContext
from ...session import DraftSession
from ...target.devices import input_device
from ...transfer import waits
from ..chains import ChainSession, candidates_of
from ..draft_model import ModelDraft, ModelDrafter, Translated
from ..draft_model.translating import model_of
from ..rules import Stepwise
from ..trees import TreeSession
from .classifier import StopClassifier
from .config import DiscoConfig
from .session import Classified, Threshold

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@register_drafter
class DiscoDrafter(ModelDrafter):
    """A draft model with a trained stop rule, made by `hf-specdec train disco`."""

    config_class = DiscoConfig
    config: DiscoConfig

    def __init__(
        self,
        draft_model: "PreTrainedModel | Translated",
        classifier: StopClassifier | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            draft_model: the one that the classifier was trained for; `Translated` where its tokenizer is not the
                target's.
            classifier: of this draft; None where weights are loaded later.
            options: of `DiscoConfig`; the classifier sets those that training writes, but for `lookup`.

        Raises:
            SpeculationError: a bad option, or a classifier trained for another draft.
        """
        if classifier is not None:
            options |= {"k": classifier.k, "hidden": classifier.inner.out_features, "sees_token": classifier.sees_token}
            options["draft_fingerprint"] = options.get("draft_fingerprint") or fingerprint(model_of(draft_model))
        super().__init__(draft_model, **options)
        on_cpu = not waits(input_device(self.draft_model))
        self.proposes_trees = self.config.num_candidates > 1 and self.config.rule == "budget" and on_cpu
        wanted, got = self.config.draft_fingerprint, fingerprint(self.draft_model)
        if wanted is not None and wanted != got:
            raise SpeculationError(
                f"the stop classifier was trained for another draft model (fingerprint {wanted}, this one has {got}); "
                "use the draft it was trained for, or train one with `hf-specdec train disco`"
            )
        vocab = self.draft_model.config.get_text_config(decoder=True).vocab_size
        if self.config.k > vocab:
            raise SpeculationError(
                f"k={self.config.k} is more than the draft model's vocabulary of {vocab} tokens; lower k"
            )
        self.trained = classifier is not None
        self.classifier = classifier or StopClassifier(self.config.k, self.config.hidden, self.config.sees_token)
        self.classifier.requires_grad_(False)

    def weights(self) -> dict[str, Tensor]:
        return dict(self.classifier.state_dict())

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        self.classifier.load_state_dict(weights)
        self.trained = True

    def check_trained(self) -> None:
        """
        Raises:
            SpeculationError: there is no classifier.
        """
        if not self.trained:
            raise SpeculationError(
                "speculation_type='disco' needs a trained stop classifier; train one with `hf-specdec train disco` and "
                "pass it as assistant_model=Drafter.from_pretrained(folder) or speculation={'drafter': folder}"
            )

    def check_target(self, target: "PreTrainedModel") -> None:
        self.check_trained()
        super().check_target(target)

    def start(self, context: DraftContext) -> DraftSession:
        self.check_prompt(context)
        classified = Classified(context, self.config, self.classifier)
        if self.config.rule == "token":
            rule = Threshold(self.config.threshold(context.do_sample), self.config.max_draft_tokens)
            return ChainSession(context, ModelDraft(context, self.draft, DraftCost(), None, classified), rule)
        k = candidates_of(context, self.config.num_candidates)
        experience = self._experience.of(context.target, (context.rows, context.do_sample))
        # Of point masses those are verified that pay; to see them all, an accelerator would be waited for.
        chains = context.do_sample or waits(input_device(self.draft_model))
        control = Controller(context, experience, candidates=1 if chains else k, longest=self.config.max_draft_tokens)
        model = ModelDraft(context, self.draft, control.cost, None if chains else k, classified)
        if chains:
            return ChainSession(context, model, Stepwise(control))
        return TreeSession(context, control.acceptance, (), model, control, most=MOST_NODES)


def fingerprint(model: "PreTrainedModel") -> str:
    """Tells drafts apart: a hash of sizes and of the first values of every weight, some of which any training changes.

    Rounded to bfloat16, so that it does not depend on the dtype that the model was loaded in.
    """
    config = model.config.get_text_config(decoder=True)
    parts = hashlib.sha256(f"{config.model_type} {config.vocab_size} {config.hidden_size}".encode())
    for name, weight in sorted(model.named_parameters()):
        if weight.is_floating_point() and not weight.is_meta:
            rounded = weight.detach().flatten()[:8].to(torch.bfloat16).view(torch.uint8).cpu()
            parts.update(name.encode() + rounded.numpy().tobytes())
    return parts.hexdigest()[:16]
