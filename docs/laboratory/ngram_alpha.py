"""α of unigram, bigram and trigram drafts, as in Table 3 of Leviathan et al. 2023.

Run as `python docs/laboratory/ngram_alpha.py --help`. α is the mean of β = Σ min(p, q) over the positions of the
target's own outputs (Corollary 3.6); at T=0 both p and q are all on their likeliest token.
"""

from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from hf_specdec.drafters.ngram import NGramModel
from hf_specdec.tools.loading.chat import prompt_ids
from hf_specdec.tools.loading.models import ModelSource, load_model, load_tokenizer
from hf_specdec.tools.loading.prompts import load_prompts
from hf_specdec.tools.loading.rows import set_name
from hf_specdec.tools.loading.sampling import sampling_at
from hf_specdec.train.ngram import token_stream, train_ngram

PAPER = {
    (1, 0): "0.03 / 0.08 / 0.13",
    (2, 0): "0.05 / 0.20 / 0.23",
    (1, 1): "0.03 / 0.07 / 0.08",
    (2, 1): "0.05 / 0.19 / 0.16",
}
"""Table 3 by (order, T): GPT-like on lm1b, T5-XXL on English to German, T5-XXL on CNN/DM."""


@torch.no_grad()
def alphas(
    target: Any, prompt: torch.Tensor, models: list[NGramModel], temperature: int, new: int
) -> list[list[float]]:
    """β per n-gram model and position of one output of the target."""
    ids = target.generate(prompt, max_new_tokens=new, **sampling_at(temperature))
    p = target(ids).logits[0, prompt.shape[1] - 1 : -1].float().softmax(-1).numpy()
    tokens = ids[0].tolist()
    betas: list[list[float]] = [[] for _ in models]
    for i, p_i in enumerate(p):
        context = tokens[: prompt.shape[1] + i]
        for beta, model in zip(betas, models, strict=True):
            q_i = model.next_probs(context)[: len(p_i)]
            overlap = np.minimum(p_i[: len(q_i)], q_i).sum() if temperature else p_i.argmax() == q_i.argmax()
            beta.append(float(overlap))
    return betas


def main(
    target: Annotated[str, typer.Option(help="the target's folder or repo")],
    data: Annotated[list[str], typer.Option(help="text to train the n-gram models on")],
    prompts: Annotated[str, typer.Option(help="file, set or data set, as for `hf-specdec bench`")],
    limit: Annotated[int, typer.Option(help="prompts")] = 40,
    max_new_tokens: int = 64,
) -> None:
    """Print α per order and temperature beside the paper's."""
    source = ModelSource(target, "float32")
    tokenizer, model = load_tokenizer(source), load_model(source)
    documents = list(token_stream(tokenizer, data))
    models = [train_ngram(documents, len(tokenizer), order) for order in (1, 2, 3)]
    table = Table("draft", "T", "α", "paper: lm1b / EnDe / CNN-DM")
    for temperature in (0, 1):
        torch.manual_seed(0)
        betas: list[list[float]] = [[] for _ in models]
        for prompt in tqdm(load_prompts(prompts, limit), desc=f"T={temperature}"):
            ids = torch.tensor([prompt_ids(tokenizer, prompt)])
            for all_betas, new in zip(betas, alphas(model, ids, models, temperature, max_new_tokens), strict=True):
                all_betas += new
        for order, (name, beta) in enumerate(zip(("unigram", "bigram", "trigram"), betas, strict=True), start=1):
            table.add_row(name, str(temperature), f"{np.mean(beta):.2f}", PAPER.get((order, temperature), "-"))
    Console(width=100).print(f"{set_name(prompts)}, {sum(map(len, documents)):,} tokens of training text", table)


if __name__ == "__main__":
    typer.run(main)
