"""A real speech model writes down real recordings: the target's calls and the time that drafts save, batches included.

    python docs/laboratory/speech.py

The model and the recordings come with a package (`moonshine.py` beside this says which). Recordings are cut where they
are quiet. Methods take turns at each piece, or batch of pieces; every text is held against plain decoding's.
"""

import time
from typing import Annotated, Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm
from typer import Option, run

from hf_specdec import Drafter, PromptLookupDrafter, SuffixDrafter
from moonshine import RATE, load_moonshine, recording, words

RECORDINGS = "two_cities.wav", "beckett.wav", "endgame_nagg_nell.wav"
TOKENS_PER_SECOND = 6.5
"""that the model is meant to write at most"""


def main(
    seconds: Annotated[float, Option(help="Longest piece.")] = 10.0,
    batch: Annotated[list[int], Option(help="Pieces written down together.")] = [1, 4],  # noqa: B006
    show: Annotated[bool, Option(help="Print the texts, too.")] = False,
) -> None:
    """Decode and print."""
    model, said = load_moonshine(), words()
    pieces = [piece for name in RECORDINGS for piece in recording(name, seconds)]
    table = Table("batch", "method", "target calls", "of plain's", "speed-up", "texts that are plain's")
    for size in batch:
        batches = [pieces[i : i + size] for i in range(0, len(pieces), size)]
        for name, calls, speed, same in compared(model, batches, said if show and size == 1 else []):
            shares = f"{calls[0]:,}", f"{calls[0] / calls[1]:.2f}", f"{speed:.2f}"
            table.add_row(str(size), name, *shares, f"{same} of {len(batches)}")
    Console().print(f"{len(pieces)} pieces, {sum(map(len, pieces)) / RATE:.0f} s of speech")
    Console().print(table)


def compared(model: Any, batches: list[list[Tensor]], said: list[str]) -> list[tuple[str, list[int], float, int]]:
    """Of each method: its calls and plain decoding's, its speed-up, and how many batches had the same text."""
    drafters: dict[str, Drafter | None] = {
        "plain": None,
        "prompt lookup": PromptLookupDrafter(min_match=1),
        "suffix, remembers all texts": SuffixDrafter(),
    }
    calls, same = (dict.fromkeys(drafters, 0) for _ in range(2))
    seconds = dict.fromkeys(drafters, 0.0)
    write(model, batches[0], None)
    for pieces in tqdm(batches, desc="pieces"):
        plain: Tensor | None = None
        for name, drafter in drafters.items():
            began = time.perf_counter()
            text = write(model, pieces, drafter)
            seconds[name] += time.perf_counter() - began
            plain = text if plain is None else plain
            same[name] += torch.equal(text, plain)
            calls[name] += plain.shape[1] - 1 if drafter is None else drafter.last_stats.target_calls  # type: ignore[union-attr]
        if said and plain is not None:
            tqdm.write("".join(said[token] for token in plain[0].tolist()))
    base = seconds["plain"]
    return [(name, [calls[name], calls["plain"]], base / seconds[name], same[name]) for name in drafters]


def write(model: Any, pieces: list[Tensor], drafter: Drafter | None) -> Tensor:
    """The tokens of what was said, [B, T]."""
    longest = max(map(len, pieces))
    sound = torch.stack([torch.nn.functional.pad(piece, (0, longest - len(piece))) for piece in pieces])
    heard = torch.stack([torch.arange(longest) < len(piece) for piece in pieces]).long()
    options = {"max_new_tokens": int(longest / RATE * TOKENS_PER_SECOND), "do_sample": False, "pad_token_id": 2}
    drafted = {} if drafter is None else {"assistant_model": drafter}
    return model.generate(input_values=sound, attention_mask=heard, **options, **drafted)


if __name__ == "__main__":
    run(main)
