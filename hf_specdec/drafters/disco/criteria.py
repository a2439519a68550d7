"""`DiscoStoppingCriteria`: DISCO's threshold τ for any plain `generate` call of a draft model."""

from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

from ...errors import SpeculationError
from .classifier import NONE, Recurrence, read
from .drafter import DiscoDrafter


class DiscoStoppingCriteria(StoppingCriteria):
    """Stops each row where the draft should hand over to the target.

        draft.generate(**inputs, stopping_criteria=[DiscoStoppingCriteria(drafter)],
                       return_dict_in_generate=True, output_scores=True)

    The token after which a row stops is kept: it has been drawn, and dropping it would change what is said.
    """

    def __init__(self, drafter: DiscoDrafter, do_sample: bool = False, prompt_length: int | None = None) -> None:
        """
        Args:
            drafter: whose classifier and τ to use.
            do_sample: whether the draft samples; there is a τ for each.
            prompt_length: columns of the prompt where `generate` continues a text; else its input is the prompt.
        """
        drafter.check_trained()
        self.drafter, self.do_sample, self.prompt_length = drafter, do_sample, prompt_length
        self.texts: list[Recurrence] = []

    def __call__(self, input_ids: Tensor, scores: tuple[Tensor, ...] | None, **kwargs: Any) -> Tensor:
        """[B] bool: whether each row stops after its last token."""
        if not scores:
            raise SpeculationError(
                "DiscoStoppingCriteria reads the draft's scores; call generate(..., return_dict_in_generate=True, "
                "output_scores=True)"
            )
        tau, longest = self.drafter.config.threshold(self.do_sample), self.drafter.config.max_draft_tokens
        chances = self._chances(input_ids, scores)
        return torch.tensor([len(scores) >= longest or c < tau for c in chances], device=input_ids.device)

    def _chances(self, input_ids: Tensor, scores: tuple[Tensor, ...]) -> list[float]:
        """The classifier's chance C [B] of each row's last token."""
        rows, step = input_ids.shape[0], len(scores) - 1
        if step == 0:  # a new call of generate
            self.chance = self.drafter.classifier.reader(self.do_sample)
            self.texts = [Recurrence(row[:-1]) for row in input_ids.tolist()]
        proposed = [text.proposal() if self.drafter.config.lookup else NONE for text in self.texts]
        generated = step if self.prompt_length is None else input_ids.shape[1] - 1 - self.prompt_length
        logits = scores[-1].clamp_min(-1e4)  # processors forbid tokens with -inf
        reading = read(logits, input_ids[:, -1], self.drafter.config.k)
        chances = self.chance(reading, [generated] * rows, proposed)
        for text, token in zip(self.texts, reading.tokens, strict=True):
            text.extend([token])
        return chances
