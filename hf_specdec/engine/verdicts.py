"""How a drafter is told what became of its draft."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ..protocol import Draft, Feature, Forward, Verdict
from ..transfer import to_device, to_host
from ..verify.trial import Result
from .rows import Row


def verdict_of(rows: Sequence[Row], draft: Draft, forward: Forward, results: Sequence[Result]) -> Verdict:
    """What a session is told of its rows' results; times are filled in by who took them."""
    likeliest = [result.likeliest for result in results]
    verdict = Verdict(
        rows=[row.number for row in rows],
        drafted=[result.drafted for result in results],
        accepted=[len(result.path) for result in results],
        # A row without a token to draw has failed. Its drafter is told of a token all the same.
        tokens=[[max(token, 0) for token in result.tokens] for result in results],
        stopped=[row.stopped for row in rows],
        width=forward.logits.shape[1],
        seconds=0.0,
        draft=replace(draft, lengths=list(draft.lengths), sources=list(draft.sources)),  # they are counted later
        paths=[list(result.path) for result in results],
        nodes=forward.nodes,
        likeliest=likeliest if any(likeliest) else [],
    )
    if forward.features:
        verdict.features = _along_paths(forward, draft, verdict)
    return verdict


def _along_paths(forward: Forward, draft: Draft, verdict: Verdict) -> dict[Feature, Tensor]:
    """The features of each row where its tokens were decided [B, T, H]."""
    width = max(map(len, verdict.tokens))
    if draft.parents is None and forward.nodes is None:
        return {name: states[:, :width] for name, states in forward.features.items()}
    kept = None if forward.nodes is None else to_host(forward.nodes)
    places = []
    for b, path in enumerate(verdict.paths):
        decided = path[: len(verdict.tokens[b]) - 1]
        row = [0, *(1 + (node if kept is None else kept[b].index(node)) for node in decided)]
        places.append(row + [0] * (width - len(row)))
    found = {}
    for name, states in forward.features.items():
        index = to_device(places, states.device)[..., None].expand(-1, -1, states.shape[2])
        found[name] = states.gather(1, index)
    return found
