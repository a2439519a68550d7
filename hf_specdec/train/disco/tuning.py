"""τ of rule "token": the one that takes least time on validation prompts (Mamou 2024, Appendix E)."""

from collections.abc import Mapping, Sequence

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...clock import now
from ...drafters.disco.drafter import DiscoDrafter
from ...target.devices import input_device
from ...tools.loading.chat import batch, prompt_ids
from ...tools.loading.prompts import Prompt
from .extraction import Regime

TAUS = (0.1, 0.3, 0.5, 0.7, 0.9)


def seconds_per_token(
    target: PreTrainedModel,
    drafters: Mapping[float, DiscoDrafter],
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    regime: Regime,
) -> dict[float, float]:
    """Time that decoding the prompts takes with each drafter, by its τ. They take turns at each prompt.

    Args:
        prompts: at least one; the first is decoded once more, before the others, to warm up.
    """
    seconds, tokens = dict.fromkeys(drafters, 0.0), dict.fromkeys(drafters, 0)
    taus = list(drafters)
    for number, prompt in enumerate(tqdm([prompts[0], *prompts], desc="timing τ", unit=" prompts")):
        inputs = batch([prompt_ids(tokenizer, prompt)], tokenizer.pad_token_id, input_device(target))
        columns, turn = inputs["input_ids"].shape[1], number % len(taus)
        for tau in taus[turn:] + taus[:turn]:
            torch.manual_seed(regime.seed + number)
            began = now()
            text = target.generate(
                **inputs, assistant_model=drafters[tau], pad_token_id=tokenizer.pad_token_id, **regime.options()
            )
            if number:
                seconds[tau] += now() - began
                tokens[tau] += text.shape[1] - columns
    return {tau: seconds[tau] / tokens[tau] for tau in taus}
