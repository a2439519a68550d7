"""How often a round waited for the device before the loop was rebuilt.

`git worktree add FOLDER c1e27f0`, then `python docs/laboratory/transfers_before.py FOLDER`. Counted as in
tests/test_transfers.py, over the drafters that no clock drives; every copy that the host makes is one that waits there.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

NEW = 40


def main(folder: Path) -> None:
    here = Path(__file__).parent.parent.parent
    sys.path[:0] = [str(folder), str(folder / "tests"), str(here / "tests")]
    later: Any = ModuleType("hf_specdec.transfer")  # there was no such module
    later.to_device = lambda: None
    sys.modules[later.__name__] = later
    transfers = importlib.import_module("counting").Transfers
    models, package = importlib.import_module("models"), importlib.import_module("hf_specdec")
    nearly = importlib.import_module("test_architectures").nearly
    documents = importlib.import_module("test_ngram").documents
    train = importlib.import_module("hf_specdec.training.ngram").train_ngram
    loop = importlib.import_module("hf_specdec.decoding.loop").Decoding
    session = importlib.import_module("hf_specdec.drafters.draft_model.drafter").DraftModelSession
    session.shortened = lambda self, *told: told[-1]  # as on an accelerator
    assert Path(str(package.__file__)).is_relative_to(folder.resolve()), "another checkout is installed in its place"

    target = models.llama(16)
    makes = {
        "draft_model": lambda: package.DraftModelDrafter(nearly(target), num_draft_tokens=4),
        "prompt_lookup": lambda: package.PromptLookupDrafter(),
        "prompt_lookup, 3 branches": lambda: package.PromptLookupDrafter(num_branches=3),
        "suffix": lambda: package.SuffixDrafter(),
        "ngram": lambda: package.NGramDrafter(train(documents(16), 16, 3)),
    }
    play, counted = loop.play_round, []

    def counting(self: Any) -> None:
        with transfers() as round:
            play(self)
        counted.append(round.counts)

    loop.play_round = counting
    for name, make in makes.items():
        cells = []
        for lengths in ([9], [9, 5, 1, 7]):
            for do_sample in (False, True):
                counted.clear()
                torch.manual_seed(0)
                options = {"do_sample": do_sample, "top_k": 0, "pad_token_id": 0, "eos_token_id": None}
                inputs = models.prompts(lengths, 16)
                target.generate(**inputs, **options, max_new_tokens=NEW, assistant_model=make())
                read, written = (sum(c[kind] for c in counted) / len(counted) for kind in ("to_host", "waiting"))
                cells.append(f"{read:.1f} + {written:.1f}")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
