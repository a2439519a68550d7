"""What each of DISCO's features says about a greedy draft: cross-entropy of acceptance on texts not trained on.

Run as `python docs/laboratory/disco_features.py --target smollm2 --pack-linear --draft DRAFT --trained FOLDER
--prompts sentences ...`, where FOLDER was written by `hf-specdec train disco`: its records train a
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
from hf_specdec.drafters.disco import DiscoDrafter, StopClassifier
from hf_specdec.drafters.disco.classifier import EXTRA
from hf_specdec.tools.loading.models import PairSettings
from hf_specdec.tools.loading.prompts import load_prompts
from hf_specdec.tools.loading.rows import set_name
from hf_specdec.train.disco.extraction import Regime, extract, load
from hf_specdec.train.disco.fitting import fit
from hf_specdec.train.disco.records import Record

Estimate = Callable[[Tensor], Tensor]
"""chances [N] by features [N, k + 4]"""

DRAFTED = Evidence.of("drafted")


@dataclass(kw_only=True)
class FeatureSettings(PairSettings):
    """Whose drafts, and what to learn from."""

    trained: Annotated[str, Option(help="Folder of `hf-specdec train disco`.")]
    prompts: Annotated[list[str], Option(help="Files of prompts to judge on.")] = field(default_factory=list)
    limit: Annotated[int, Option(help="Prompts of each.")] = 20
    max_new_tokens: Annotated[int, Option(help="Per prompt.")] = 64
    saved: Annotated[str | None, Option(help="A DISCO drafter to judge beside them.")] = None
    records: Annotated[str, Option(help="Folder for what was seen.")] = "records"


def selections(k: int) -> dict[str, list[int]]:
    """Features by name: those that a classifier sees, as columns of [N, k + 4]."""
    chances, entropy, position, copies = list(range(k)), [k], [k + 1], [k + 2, k + 3]
    whole = [*chances, *entropy, *position, *copies]
    return {
        f"the {k} largest chances": chances,
        "all": whole,
        "all but entropy": [i for i in whole if i not in entropy],
        "all but position": [i for i in whole if i not in position],
        "all but copies": [i for i in whole if i not in copies],
    }


def seen_by(columns: Sequence[int], records: Sequence[Record]) -> list[Record]:
    """Records without the other features."""
    return [replace(record, features=masked(record.features, columns)) for record in records]


def masked(features: Tensor, columns: Sequence[int]) -> Tensor:
    """Zero wherever a feature is not among the columns."""
    return torch.zeros_like(features).index_copy_(1, torch.tensor(columns), features[:, list(columns)])


def of_classifier(classifier: StopClassifier, columns: Sequence[int]) -> Estimate:
    """Its chance C in greedy decoding."""
    return lambda features: classifier(masked(features, columns))[:, 0].sigmoid()


def nats(estimate: Estimate | None, records: Sequence[Record]) -> float:
    """Mean −log of the chance that was given to what happened; each token is judged before it is learned from.

    Args:
        estimate: None for the share that was right of late.
    """
    acceptance, lost, tokens = Acceptance(), 0.0, 0
    for record in records:
        said = [None] * len(record) if estimate is None else estimate(record.features).tolist()
        for chance, right in zip(said, record.accepted.tolist(), strict=True):
            evidence = DRAFTED if chance is None else DRAFTED.at(chance)
            expected = acceptance.chance(evidence, 0.5) if chance is None else acceptance.calibrated(evidence)
            lost -= math.log(expected if right else 1 - expected)
            acceptance.observe(evidence, right)
            tokens += 1
    return lost / tokens


def main(settings: FeatureSettings) -> None:
    """Train, judge, tell."""
    pair = settings.load()
    assert pair.draft is not None
    folder = Path(settings.trained) / "extraction"
    training, validation = (list(load(folder / f"greedy-{split}")) for split in ("training", "validation"))
    k = training[0].features.shape[1] - EXTRA
    estimates: dict[str, Estimate | None] = {
        "share that was right": None,
        "the draft's own chance": lambda features: features[:, 0],
    }
    for name, columns in selections(k).items():
        parts = seen_by(columns, training), seen_by(columns, validation)
        estimates[name] = of_classifier(fit({False: parts[0]}, {False: parts[1]}), columns)
    if settings.saved is not None:
        drafter: Any = Drafter.from_pretrained(settings.saved)
        assert isinstance(drafter, DiscoDrafter)
        estimates["saved"] = of_classifier(drafter.classifier, range(k + EXTRA))
    regime = Regime(False, settings.max_new_tokens, k, 0)
    table = Table("nats per token", *map(set_name, settings.prompts))
    seen = []
    for path in settings.prompts:
        some = load_prompts(path)[: settings.limit]
        mine = Path(settings.records) / set_name(path)
        seen.append(extract(pair.target, pair.draft, pair.tokenizer, some, regime, mine))
    for name, estimate in estimates.items():
        table.add_row(name, *(f"{nats(estimate, records):.3f}" for records in seen))
    Console().print(table)


if __name__ == "__main__":
    command(main, None, __doc__)()
