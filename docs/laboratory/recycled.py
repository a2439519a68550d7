"""Do candidates that earlier forwards named help a draft model? They are free: no step is made for them.

Run as `python docs/laboratory/recycled.py --target smollm2 --pack-linear --draft hub_configs/draft_model/draft_model
--prompts data/spec_bench.jsonl`. The target writes greedily; at each place its next token is looked for among the draft
model's likeliest, and among the four that the target itself found likeliest when it last stood behind the same token
(or the same two), in this text or an earlier one.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Annotated

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm
from typer import Option

from hf_specdec import SpeculationError
from hf_specdec.commands.options import command
from hf_specdec.loading.chat import prompt_ids
from hf_specdec.loading.models import PairSettings
from hf_specdec.loading.prompts import load_prompts

KEPT = 4
"""tokens that are kept of a place"""
MOST = 8
"""of the draft model's"""


@dataclass(kw_only=True)
class RecycledSettings(PairSettings):
    """What is written."""

    prompts: Annotated[list[str], Option(help="JSON lines, or text with a prompt per line.")]
    limit: Annotated[int, Option(help="Prompts of each file.")] = 40
    learn: Annotated[int, Option(help="Of all prompts, those that are not counted.")] = 10
    max_new_tokens: Annotated[int, Option(help="Per prompt.")] = 96


class Recycled:
    """What stood behind a token, and behind two."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, ...], list[int]] = {}

    def after(self, text: list[int], order: int) -> list[int]:
        """The target's likeliest tokens where it last stood behind the last `order` tokens."""
        return self.known.get(tuple(text[-order:]), [])

    def learn(self, text: list[int], likeliest: list[int]) -> None:
        for order in (1, 2):
            self.known[tuple(text[-order:])] = likeliest


def hits(recycled: Recycled, text: list[int], drafted: list[int], token: int) -> Counter[str]:
    """Who had the next token."""
    one, two = recycled.after(text, 1), recycled.after(text, 2)
    named = {f"draft model, {n}": drafted[:n] for n in (1, 3, 5, 7)}
    named |= {"behind one token, 4": one, "behind two tokens, 4": two}
    named |= {"draft model 1, behind one 4": drafted[:1] + one, "draft model 3, behind one 4": drafted[:3] + one}
    named |= {"draft model 3, behind two 4": drafted[:3] + two}
    return Counter({who: int(token in tokens) for who, tokens in named.items()})


@torch.inference_mode()
def main(settings: RecycledSettings) -> None:
    """Write, look, and print."""
    pair = settings.load()
    if pair.draft is None:
        raise SpeculationError("draft is not set; name a draft model to compare with")
    prompts = [prompt for name in settings.prompts for prompt in load_prompts(name, settings.limit)]
    recycled, found, places = Recycled(), Counter[str](), 0
    for number, prompt in enumerate(tqdm(prompts, unit="prompt")):
        ids = torch.tensor([prompt_ids(pair.tokenizer, prompt)], device=pair.target.device)
        written: Tensor = pair.target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=settings.max_new_tokens, do_sample=False
        )
        likeliest = pair.target(written).logits[0].topk(KEPT).indices.tolist()
        drafted = pair.draft(written.to(pair.draft.device)).logits[0].topk(MOST).indices.tolist()
        text = written[0].tolist()
        for end in range(1, len(text)):
            if end >= ids.shape[1] and number >= settings.learn:
                found.update(hits(recycled, text[:end], drafted[end - 1], text[end]))
                places += 1
            recycled.learn(text[:end], likeliest[end - 1])
    table = Table("named by", "has the next token", title=f"{places} places")
    for who, count in found.items():
        table.add_row(who, f"{count / max(places, 1):.3f}")
    Console().print(table)


if __name__ == "__main__":
    command(main, None, __doc__)()
