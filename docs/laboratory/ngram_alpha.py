"""α of unigram, bigram and trigram drafts, as in Table 3 of Leviathan et al. 2023.

    python docs/laboratory/ngram_alpha.py --target tests/pair/target --data openai/gsm8k:train --prompts openai/gsm8k

α is the mean of β = Σ min(p, q) over the positions of the target's own outputs (Corollary 3.6). At T = 0 both p and q
put everything on their likeliest token.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from tqdm import tqdm
from typer import Option

from hf_specdec.commands.options import command
from hf_specdec.drafters.ngram import NGramModel
from hf_specdec.tools.loading.chat import prompt_ids
from hf_specdec.tools.loading.models import TargetSettings
from hf_specdec.tools.loading.prompts import load_prompts
from hf_specdec.tools.loading.sampling import sampling_at
from hf_specdec.train.ngram import token_stream, train_ngram
from shared import show


@dataclass(kw_only=True)
class AlphaSettings(TargetSettings):
    """What is counted and compared."""

    data: Annotated[list[str], Option(help="Text to train the n-gram models on.")]
    prompts: Annotated[str, Option(help="File, set or data set, as for `hf-specdec bench`.")]
    limit: Annotated[int, Option(help="Prompts.")] = 40
    max_new_tokens: Annotated[int, Option(help="Per prompt.")] = 64


@torch.no_grad()
def betas(target: Any, prompt: torch.Tensor, models: list[NGramModel], temperature: float, new: int) -> np.ndarray:
    """[models, positions] β of each n-gram model along one output of the target."""
    ids = target.generate(prompt, max_new_tokens=new, **sampling_at(temperature))
    p = target(ids).logits[0, prompt.shape[1] - 1 : -1].float().softmax(-1).numpy()
    tokens = ids[0].tolist()
    found = np.zeros((len(models), len(p)))
    for i, p_i in enumerate(p):
        for order, model in enumerate(models):
            q_i = model.next_probs(tokens[: prompt.shape[1] + i])[: len(p_i)]
            found[order, i] = np.minimum(p_i[: len(q_i)], q_i).sum() if temperature else p_i.argmax() == q_i.argmax()
    return found


def main(settings: AlphaSettings) -> None:
    """Print α per order and temperature."""
    pair = settings.load()
    documents = list(token_stream(pair.tokenizer, settings.data))
    models = [train_ngram(documents, len(pair.tokenizer), order) for order in (1, 2, 3)]
    prompts = [torch.tensor([prompt_ids(pair.tokenizer, p)]) for p in load_prompts(settings.prompts, settings.limit)]
    rows = []
    for temperature in (0.0, 1.0):
        torch.manual_seed(0)
        found = [
            betas(pair.target, prompt, models, temperature, settings.max_new_tokens)
            for prompt in tqdm(prompts, desc=f"T={temperature:g}")
        ]
        alphas = np.concatenate(found, axis=1).mean(axis=1)
        names = ("unigram", "bigram", "trigram")
        rows += [(name, f"{temperature:g}", f"{alpha:.2f}") for name, alpha in zip(names, alphas, strict=True)]
    show(("draft", "T", "α"), rows)


if __name__ == "__main__":
    command(main, None, __doc__)()
