"""`DiscoDrafter`: after every drafted token a classifier decides whether to draft one more (Mamou 2024, §3)."""

import hashlib
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ...errors import SpeculationError
from ...protocol import Draft, DraftContext, DraftSession, Sequences
from ...registry import register_drafter
from ..draft_model import DraftModelSession, ModelDrafter
from .classifier import Reading, StopClassifier, read
from .config import DiscoConfig
from .lookup import NONE, Branch, Recurrence
from .rules import StopRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@register_drafter
class DiscoDrafter(ModelDrafter):
    """A draft model with a trained stop rule, made by `hf-specdec train disco`."""

    config_class = DiscoConfig
    config: DiscoConfig

    def __init__(
        self,
        draft_model: "PreTrainedModel",
        classifier: StopClassifier | None = None,
        *,
        rule: Literal["token", "draft"] = "draft",
        tau: float = 0.4,
        tau_sampled: float = 0.4,
        max_draft_tokens: int = 16,
        lookup: bool = True,
        k: int = 10,
        hidden: int = 32,
        draft_fingerprint: str | None = None,
    ) -> None:
        """
        Args:
            draft_model: the one that the classifier was trained for.
            classifier: of this draft; sets `k`, `hidden` and `draft_fingerprint`.
            rule: stop when the last token's chance of acceptance falls below τ, or when the whole draft's does.
            tau: τ in greedy decoding, a chance, from 0 to 1.
            tau_sampled: τ in sampling, a chance, from 0 to 1.
            max_draft_tokens: SLmax, from 1 to 512.
            lookup: whether the classifier sees if copying from earlier text proposes the draft's best token; set by
                training.
            k: how many of the draft's top probabilities the classifier sees, from 1 to 1024; written by training.
            hidden: its inner units, from 1 to 1024; written by training.
            draft_fingerprint: of the draft that the classifier was trained for, at most 64 characters; written by
                training.

        Raises:
            SpeculationError: a bad option, or a classifier trained for another draft.
        """
        if classifier is not None:
            k, hidden = classifier.k, classifier.inner.out_features
            draft_fingerprint = draft_fingerprint or fingerprint(draft_model)
        super().__init__(
            draft_model,
            rule=rule,
            tau=tau,
            tau_sampled=tau_sampled,
            max_draft_tokens=max_draft_tokens,
            lookup=lookup,
            k=k,
            hidden=hidden,
            draft_fingerprint=draft_fingerprint,
        )
        wanted, got = self.config.draft_fingerprint, fingerprint(draft_model)
        if wanted is not None and wanted != got:
            raise SpeculationError(
                f"the stop classifier was trained for another draft model (fingerprint {wanted}, this one has {got}); "
                "use the draft it was trained for, or train one with `hf-specdec train disco`"
            )
        vocab = draft_model.config.get_text_config(decoder=True).vocab_size
        if self.config.k > vocab:
            raise SpeculationError(f"k={self.config.k} is more than the draft's vocabulary of {vocab} tokens; lower it")
        self.trained = classifier is not None
        self.classifier = classifier or StopClassifier(self.config.k, self.config.hidden)
        self.classifier.requires_grad_(False)

    def weights(self) -> dict[str, Tensor]:
        return dict(self.classifier.state_dict())

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        self.classifier.load_state_dict(weights)
        self.trained = True

    def check_target(self, target: "PreTrainedModel") -> None:
        if not self.trained:
            raise SpeculationError(
                "speculation_type='disco' has no trained stop classifier; train one with `hf-specdec train disco` and "
                "pass it as assistant_model=Drafter.from_pretrained(folder) or speculation={'drafter': folder}"
            )
        super().check_target(target)

    def rule(self, do_sample: bool) -> StopRule:
        """The stop rule of one generation."""
        config = self.config
        return StopRule(config.tau_sampled if do_sample else config.tau, config.rule == "draft")

    def start(self, context: DraftContext) -> DraftSession:
        return DiscoSession(context, self)


class DiscoSession(DraftModelSession):
    """Drafts with a model until the rule says stop.

    The rule is asked after token i about drafting token i + 1. It knows q up to position i and earlier tokens, and
    token i is verified either way: which positions are verified never depends on the token drawn there, so the output
    keeps the target's distribution. Asking before the forward at i + 1 saves that forward, too.
    """

    def __init__(self, context: DraftContext, drafter: DiscoDrafter) -> None:
        super().__init__(context, drafter.draft_model, drafter.config.max_draft_tokens)
        self.rule = drafter.rule(context.do_sample)
        self.chance = drafter.classifier.reader(context.do_sample)
        self.lookup, self.k = drafter.config.lookup, drafter.config.k
        self.texts: dict[int, Recurrence] = {}
        """per row of the call, the accepted text"""
        self.known: dict[int, int] = {}
        """how many tokens of it are in there"""
        self.seen: list[list[float]] = []
        """[B] the chances C_1 … C_i of the round"""
        self.branches: list[Branch] = []
        """[B] each row's text with the round's draft"""

    def chances(self, step: int, reading: Reading, sequences: Sequences, branches: list[Branch]) -> list[float]:
        """C [B] of draft token `step` (from 0), from the draft's distribution there and the tokens before it."""
        start = step - self.context.prompt_ids.shape[1]
        position = [n + start for n in sequences.lengths]
        proposed = [branch.proposal() if self.lookup else NONE for branch in branches]
        return self.chance(reading, position, proposed)

    def _branches(self, sequences: Sequences) -> list[Branch]:
        """A branch of each row's text as accepted so far."""
        for row, tokens in zip(sequences.rows, sequences.tokens, strict=True):
            self.texts.setdefault(row, Recurrence()).extend(tokens[self.known.get(row, 0) :])
            self.known[row] = len(tokens)
        return [Branch(self.texts[row]) for row in sequences.rows]

    def propose(self, sequences: Sequences, budget: list[int]) -> Draft:
        self.seen = [[] for _ in budget]
        self.branches = self._branches(sequences)
        return super().propose(sequences, budget)

    def shortened(
        self, step: int, logits: Tensor, tokens: Tensor, sequences: Sequences, lengths: list[int]
    ) -> list[int]:
        reading = read(logits, self.k, tokens)
        chances, drawn = self.chances(step, reading, sequences, self.branches), reading.drawn
        shorter = self.until_eos(step, drawn, lengths)
        for b, chance in enumerate(chances):
            if lengths[b] > step:
                self.seen[b].append(chance)
            if shorter[b] > step + 1 and not self.rule.goes_on(self.seen[b]):
                shorter[b] = step + 1
        for branch, token in zip(self.branches, drawn, strict=True):
            branch.append(token)
        return shorter


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
