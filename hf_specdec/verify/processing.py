"""Logits processors over blocks of positions.

Plain decoding calls each processor once per position with the whole batch. A verification forward yields several
positions at once, and rows of different lengths, so processors are told apart by what they look at:

- *free*: the scores alone, applied to a whole block in one call;
- *prefix*: also the tokens before, without keeping state, applied to all positions of equal length at once;
- *grammars* of known libraries, whose state moves along drafts and back (`hf_specdec.grammars`);
- *opaque*: anything else (a user's, a stateful one, one that looks at the row index). These must see exactly plain's
  calls, which only a step-by-step judgement gives (see `judging`).
"""

from collections import defaultdict
from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as lp

from ..grammars import Grammar, Text, grammar_of
from ..picker import Forbids
from ..transfer import to_device, to_host
from .trial import Trial

FREE = {
    lp.TemperatureLogitsWarper,
    lp.TopKLogitsWarper,
    lp.TopPLogitsWarper,
    lp.MinPLogitsWarper,
    lp.TypicalLogitsWarper,
    lp.EpsilonLogitsWarper,
    lp.EtaLogitsWarper,
    lp.InfNanRemoveLogitsProcessor,
    lp.LogitNormalization,
    lp.SuppressTokensLogitsProcessor,
}
PREFIX = {
    lp.MinLengthLogitsProcessor,
    lp.MinNewTokensLengthLogitsProcessor,
    lp.RepetitionPenaltyLogitsProcessor,
    lp.NoRepeatNGramLogitsProcessor,
    lp.SequenceBiasLogitsProcessor,
    lp.NoBadWordsLogitsProcessor,
    lp.ForcedBOSTokenLogitsProcessor,
    lp.ForcedEOSTokenLogitsProcessor,
    lp.ExponentialDecayLengthPenalty,
    lp.SuppressTokensAtBeginLogitsProcessor,
}

FORBIDDING = {
    lp.MinLengthLogitsProcessor,
    lp.MinNewTokensLengthLogitsProcessor,
    lp.NoRepeatNGramLogitsProcessor,
    lp.SequenceBiasLogitsProcessor,
    lp.NoBadWordsLogitsProcessor,
    lp.ForcedBOSTokenLogitsProcessor,
    lp.ForcedEOSTokenLogitsProcessor,
    lp.SuppressTokensAtBeginLogitsProcessor,
    lp.SuppressTokensLogitsProcessor,
}
"""Known processors that give some tokens -inf whatever the scores are. Warpers such as top-k depend on the scores."""


def is_opaque(processor: object) -> bool:
    """Exact types only: a subclass may do anything."""
    if isinstance(getattr(processor, "prompt_ignore_length", None), Tensor):
        return True  # one length per row of the batch
    return type(processor) not in FREE | PREFIX | {Grammar}


class Processing:
    """The known processors of a call, for any set of positions."""

    def __init__(self, processors: Sequence[lp.LogitsProcessor]) -> None:
        known: list[Any] = [grammar_of(p) or p for p in processors]
        self.processors = [p for p in known if not is_opaque(p)]
        self.opaque = len(self.processors) < len(processors)
        self.reads_prefix = any(type(p) in PREFIX for p in self.processors)
        self.grammars = [p for p in self.processors if isinstance(p, Grammar)]

    def __call__(
        self,
        ids: Tensor,
        rows: Sequence[int],
        lengths: Sequence[int],
        scores: Tensor,
        texts: Sequence[Text] = (),
    ) -> Tensor:
        """Process N positions.

        Args:
            ids: [R, capacity] token ids.
            rows: [N] the row of `ids` that each position continues.
            lengths: [N] how many columns of it come before the position.
            scores: [N, V] float32 logits; may be overwritten.
            texts: [N] what comes before it behind the prompt, for grammars; the first call is behind all rows' prompts.
        """
        for processor in self.processors:
            if isinstance(processor, Grammar):
                scores = processor(ids[:, : lengths[0]], texts, scores)
                continue
            if type(processor) in FREE:
                scores = processor(ids, scores)
                continue
            groups: dict[int, list[int]] = defaultdict(list)
            for n, length in enumerate(lengths):
                groups[length].append(n)
            for length, group in groups.items():
                wanted = [rows[n] for n in group]
                whole = wanted == list(range(ids.shape[0]))
                prefix = (ids if whole else ids[to_device(wanted, ids.device)])[:, :length]
                if len(groups) == 1:
                    scores = processor(prefix, scores)
                else:
                    index = to_device(group, scores.device)
                    scores = scores.index_copy(0, index, processor(prefix, scores[index]))
        return scores

    def of_trial(self, trial: Trial, depths: Sequence[Sequence[int]]) -> Tensor:
        """Scores [B, N, V] at every place of a draft.

        Args:
            depths: [B][N] how many drafted tokens lead to each place.
        """
        logits, sequences = trial.forward.logits, trial.sequences
        if not self.processors:
            return logits.float()
        scores = logits.float().reshape(-1, logits.shape[-1])
        lengths = [length + depth for length, below in zip(sequences.lengths, depths, strict=True) for depth in below]
        ids, rows = _prefixes(trial) if self.reads_prefix else (sequences.ids, [0] * len(lengths))
        texts = _texts(trial, self.grammars) if self.grammars else ()
        scores = self(ids, rows, lengths, scores.clone() if logits.dtype == torch.float32 else scores, texts)
        return scores.view(logits.shape)

    @property
    def of_drafts(self) -> "Processing":
        """Those that drafts are drawn by: without grammars, whose matchers are the judge's."""
        drafting = Processing([p for p in self.processors if not isinstance(p, Grammar)])
        drafting.opaque = self.opaque
        return drafting

    def on(self, device: torch.device) -> "Processing":
        """The same with the processors' tensors on another device; the call's own stay as they are."""
        moved = Processing(copied := [copy(processor) for processor in self.processors])
        moved.opaque = self.opaque
        for processor in copied:
            for name, value in vars(processor).items():
                if isinstance(value, Tensor):
                    setattr(processor, name, value.to(device))
        return moved


def depths_of_places(trial: Trial) -> list[list[int]]:
    """[B][N] how many drafted tokens lead to each place; 0 where a draft was lost behind its forward."""
    depths, places = trial.depths, trial.forward.logits.shape[1]
    if trial.forward.nodes is None:
        lost = [0] * places
        return [[0, *below, *lost][:places] for below in depths]
    pairs = zip(depths, trial.nodes, strict=True)
    return [[0, *[below[node] if node >= 0 else 0 for node in nodes]] for below, nodes in pairs]


def _prefixes(trial: Trial) -> tuple[Tensor, list[int]]:
    """ids [R, capacity] and, per place, the row in it whose first columns come before the place."""
    sequences, parents, (_, places, vocab) = trial.sequences, trial.draft.parents, trial.forward.logits.shape
    drafted = trial.draft.tokens.clamp(0, vocab - 1)  # processors must not meet bad ids, which the judge finds later
    (rows, k), ids = drafted.shape, sequences.ids
    if parents is None:
        for b, length in enumerate(sequences.lengths):  # columns past the length are free to write to
            ids[b, length : length + k] = drafted[b, : ids.shape[1] - length]
        return ids, [b for b in range(rows) for _ in range(places)]
    nodes = k + 1
    expanded = ids.repeat_interleave(nodes, dim=0)
    for b, length in enumerate(sequences.lengths):
        below = [0] * nodes
        for node in range(k):
            parent = parents[b][node]
            mine, above = b * nodes + node + 1, b * nodes + parent + 1
            below[node + 1] = below[parent + 1] + 1
            expanded[mine] = expanded[above]
            expanded[mine, length + below[node + 1] - 1] = drafted[b, node]
    return expanded, [b * nodes + node + 1 for b in range(rows) for node in (-1, *trial.nodes[b])]


def _texts(trial: Trial, grammars: Sequence[Grammar]) -> list[Text]:
    """[B · N] the text at each place of a draft, which begins where these grammars do."""
    sequences, draft, (_, places, vocab) = trial.sequences, trial.draft, trial.forward.logits.shape
    drafted = draft.known or to_host(draft.tokens.clamp(0, vocab - 1))  # matchers must not meet bad ids either
    chain, texts = range(-1, draft.tokens.shape[1] - 1), list[Text]()
    for b, (row, tokens, length) in enumerate(zip(sequences.rows, sequences.tokens, sequences.lengths, strict=True)):
        text = grammars[0].behind_prompt(tokens, length)
        for grammar in grammars:
            grammar.follow(row, text)
        nodes = list[list[int]]()
        for token, parent in zip(drafted[b], chain if draft.parents is None else draft.parents[b], strict=True):
            nodes.append([*(nodes[parent] if parent >= 0 else text), token])
        counted = [nodes[node] if 0 <= node < draft.lengths[b] else text for node in trial.nodes[b]]
        texts += [(row, here) for here in [text, *counted, *[text] * (places - 1 - len(counted))]]
    return texts


def bans(processing: Processing, vocab: int) -> Forbids | None:
    """What the known processors of a call forbid outright, so that a draft need not hold it; None if that is nothing.

    Args:
        vocab: of the target.
    """
    forbidding = Processing([p for p in processing.processors if _forbids(p)])
    return partial(_forbidden, forbidding, vocab) if forbidding.processors else None


def _forbidden(
    processing: Processing, vocab: int, ids: Tensor, rows: Sequence[int], lengths: Sequence[int], tokens: Sequence[int]
) -> list[bool]:
    """`Forbids`, by these processors."""
    scores = processing(ids, rows, lengths, torch.zeros(len(tokens), vocab, device=ids.device))
    return to_host(scores.gather(1, to_device(tokens, ids.device)[:, None]).isneginf()[:, 0])


def _forbids(processor: lp.LogitsProcessor) -> bool:
    if isinstance(processor, lp.SequenceBiasLogitsProcessor):
        return -float("inf") in processor.sequence_bias.values()
    return type(processor) in FORBIDDING
