"""What each of DISCO's features says about a drafted token: cross-entropy of acceptance on texts not trained on.

Run as `python docs/laboratory/disco_features.py --target smollm2 --pack-linear --draft DRAFT --trained FOLDER
--prompts sentences ...`, where FOLDER was written by `hf-specdec train disco`: its texts train a
classifier for each selection of features. Every estimate is calibrated as the budget does it, token by token.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from typer import Option

from hf_specdec import Drafter
from hf_specdec.budget import Acceptance, Evidence
from hf_specdec.commands.options import command
from hf_specdec.drafters.disco import DiscoConfig, DiscoDrafter, StopClassifier
from hf_specdec.drafters.disco.classifier import EXTRA, TOKEN
from hf_specdec.tools.loading.models import PairSettings
from hf_specdec.tools.loading.prompts import load_prompts
from hf_specdec.tools.loading.rows import set_name
from hf_specdec.train.disco.fitting import fit
from hf_specdec.train.disco.records import Record, answers, records_of
from hf_specdec.train.disco.run import REGIMES
from hf_specdec.train.writing import read_texts

Estimate = Callable[[Tensor], Tensor]
"""chances [N] by features [N, k + 6]"""

DRAFTED = Evidence.of("drafted")


@dataclass(kw_only=True)
class FeatureSettings(PairSettings):
    """Whose drafts, and what to learn from."""

    trained: Annotated[str, Option(help="Folder of `hf-specdec train disco`.")]
    prompts: Annotated[list[str], Option(help="Files of prompts to judge on.")] = field(default_factory=list)
    sampled: Annotated[bool, Option(help="Answers and drafts at temperature 1, in place of greedy ones.")] = False
    limit: Annotated[int, Option(help="Prompts of each.")] = 20
    max_new_tokens: Annotated[int, Option(help="Per prompt.")] = 64
    saved: Annotated[list[str], Option(help="DISCO drafters to judge beside them.")] = field(default_factory=list)
    records: Annotated[str, Option(help="Folder for what was seen.")] = "records"


def selections(k: int) -> dict[str, list[int]]:
    """Features by name: those that a classifier sees, as columns of [N, k + 6]."""
    whole = list(range(k + EXTRA))
    chances, entropy, position, copies, token = whole[:k], [k], [k + 1], whole[k + 2 : -1], whole[-TOKEN:]
    return {
        f"the {k} largest chances": chances,
        "all": whole,
        "all but entropy": [i for i in whole if i not in entropy],
        "all but position": [i for i in whole if i not in position],
        "all but copies": [i for i in whole if i not in copies],
        "all but the token": [i for i in whole if i not in token],
    }


def seen_by(columns: Sequence[int], records: Sequence[Record]) -> list[Record]:
    """Records without the other features."""
    return [replace(record, features=masked(record.features, columns)) for record in records]


def masked(features: Tensor, columns: Sequence[int]) -> Tensor:
    """Zero wherever a feature is not among the columns."""
    return torch.zeros_like(features).index_copy_(1, torch.tensor(columns), features[:, list(columns)])


def of_classifier(classifier: StopClassifier, columns: Sequence[int], sampled: bool) -> Estimate:
    """Its chance C."""
    return lambda features: classifier(masked(features, columns))[:, int(sampled)].sigmoid()


def nats(estimate: Estimate | None, records: Sequence[Record]) -> float:
    """Mean cross-entropy of the true chance and the one that was given; each token is judged before it is learned from.

    Args:
        estimate: None for the share that was right of late.
    """
    acceptance, lost, tokens = Acceptance(), 0.0, 0
    for record in records:
        said = [None] * len(record) if estimate is None else estimate(record.features).tolist()
        for chance, true, right in zip(said, record.chance.tolist(), record.accepted.tolist(), strict=True):
            alone = DRAFTED, acceptance.chance(DRAFTED, 0.5)
            evidence, expected = alone if chance is None else acceptance.calibrated([DRAFTED], [chance])[0]
            lost -= true * math.log(expected) + (1 - true) * math.log(1 - expected)
            acceptance.observe(evidence, right)
            tokens += 1
    return lost / tokens


def least(records: Sequence[Record]) -> float:
    """The least that any estimate can have: a draw of the draft's is accepted by chance."""
    true = torch.cat([record.chance for record in records])
    return float((torch.special.entr(true) + torch.special.entr(1 - true)).mean())


def main(settings: FeatureSettings) -> None:
    """Train, judge, tell."""
    pair = settings.load()
    assert pair.draft is not None
    folder, sampled, k = Path(settings.trained) / "training", settings.sampled, DiscoConfig.k
    name = next(name for name, do_sample in REGIMES.items() if do_sample == sampled)
    files = (folder / f"{name}-{part}" / "texts.jsonl" for part in ("training", "validation"))
    training, validation = (records_of(pair, read_texts(file), k) for file in files)
    estimates: dict[str, Estimate | None] = {
        "share that was right": None,
        "the draft's own chance": lambda features: features[:, -1].exp(),
    }
    for name, columns in selections(k).items():
        parts = seen_by(columns, training), seen_by(columns, validation)
        estimates[name] = of_classifier(fit({sampled: parts[0]}, {sampled: parts[1]}), columns, sampled)
    for saved in settings.saved:
        drafter: Any = Drafter.from_pretrained(saved)
        assert isinstance(drafter, DiscoDrafter)
        estimates[saved] = of_classifier(drafter.classifier, range(k + EXTRA), sampled)
    table = Table("nats per token", *map(set_name, settings.prompts))
    seen = []
    for path in settings.prompts:
        folder = Path(settings.records) / set_name(path)
        texts = answers(pair, load_prompts(path, settings.limit), folder, sampled, settings.max_new_tokens)
        seen.append(records_of(pair, texts, k))
    for name, estimate in estimates.items():
        table.add_row(name, *(f"{nats(estimate, records):.3f}" for records in seen))
    table.add_row("the true chance", *(f"{least(records):.3f}" for records in seen))
    Console().print(table)


if __name__ == "__main__":
    command(main, None, __doc__)()
