"""What each round of a call reads from the device and writes to it, for a drafter of every type."""

from collections import Counter
from typing import Any

import models
import pytest
import torch
from close_drafts import nearly
from counting import Transfers
from disco_models import disco
from random_walks import documents
from stream_models import streams_of

from hf_specdec import (
    DraftModelDrafter,
    HybridDrafter,
    NGramDrafter,
    PearlDrafter,
    PromptLookupDrafter,
    SuffixDrafter,
)
from hf_specdec.budget import Cost, Learned
from hf_specdec.drafters.chains import ChainSession
from hf_specdec.drafters.draft_model.model import ModelOverCache
from hf_specdec.drafters.ngram import NGramSteps
from hf_specdec.engine.generation import Generation
from hf_specdec.train.ngram import train_ngram

VOCAB, NEW = 16, 40
BATCHES = {"1": [9], "4": [9, 5, 1, 7]}
KNOWN: dict[tuple[str, str, bool], list[Counter[str]]] = {}
"""what was counted, as the table asks for it once more"""
DRAFTERS: dict[str, Any] = {
    "draft_model": lambda target: DraftModelDrafter(nearly(target), num_draft_tokens=4),
    "disco": disco,
    "pearl": lambda target: PearlDrafter(nearly(target), window=3, worker="thread"),
    "prompt_lookup": lambda target: PromptLookupDrafter(),
    "prompt_lookup, 3 branches": lambda target: PromptLookupDrafter(num_branches=3),
    "suffix": lambda target: SuffixDrafter(),
    "ngram": lambda target: NGramDrafter(train_ngram(documents(VOCAB), VOCAB, 3)),
    "hybrid": lambda target: HybridDrafter(nearly(target), num_draft_tokens=3),
    "streaming": lambda target: streams_of(target, layers=1, num_nodes=8, copies=False),
    "streaming, copies": lambda target: streams_of(target, layers=1, num_nodes=8),
    "streaming, pruned": lambda target: streams_of(target, layers=1, num_nodes=8, copies=False, prune_below=0.03),
}


def rounds(target: Any, kind: str, batch: str, do_sample: bool, monkeypatch: pytest.MonkeyPatch) -> list[Counter[str]]:
    """What was counted in each round of a call, as on an accelerator."""
    if (kind, batch, do_sample) in KNOWN:
        return KNOWN[kind, batch, do_sample]
    for module in (
        "drafters.draft_model.model_draft",
        "drafters.disco.classifier",
        "drafters.chains",
        "drafters.streaming.drafter",
    ):
        monkeypatch.setattr(f"hf_specdec.{module}.waits", lambda device: True)
    counted: list[Counter[str]] = []
    play = Generation.play_round

    def counting(self: Any) -> None:
        before = self.drafting.told.draft_calls
        with Transfers() as transfers:
            play(self)
        transfers.counts["draft steps"] = self.drafting.told.draft_calls - before
        counted.append(transfers.counts)

    def on_the_host(self: Any, sequences: Any, room: list[int]) -> Any:
        """The n-gram model drafts where it lies: the device's ids are out of its reach, the counting pauses."""
        if not isinstance(self.steps, NGramSteps):
            return propose(self, sequences, room)
        sequences.ids = sequences.ids.to("meta")
        with torch._C.DisableTorchFunction():
            return propose(self, sequences, room)

    def opening(self: Any, *args: Any, **known: Any) -> None:
        """The hybrid reads the prompt with its draft model when that is needed first, once a call."""
        with torch._C.DisableTorchFunction():
            opened(self, *args, **known)

    propose, opened = ChainSession.propose, ModelOverCache.__init__
    monkeypatch.setattr(ChainSession, "propose", on_the_host)
    monkeypatch.setattr(ModelOverCache, "__init__", opening)
    monkeypatch.setattr(Generation, "play_round", counting)
    monkeypatch.setattr("hf_specdec.engine.generation._costs", Learned(Cost))  # of another drafter's rounds, in a test
    # No drafts are left out by the clock.
    monkeypatch.setattr("hf_specdec.budget.account.GIVEN", 1 << 30)
    monkeypatch.setattr(Cost, "round", lambda *_: lambda width: 1.0)
    drafter = DRAFTERS[kind](target)
    options = {"max_new_tokens": NEW, "do_sample": do_sample, "top_k": 0, "pad_token_id": 0, "eos_token_id": None}
    torch.manual_seed(0)
    target.generate(**models.prompts(BATCHES[batch], VOCAB), **options, assistant_model=drafter)
    assert drafter.last_stats.accepted_tokens and drafter.last_stats.rejections, "nothing to count"
    KNOWN[kind, batch, do_sample] = counted
    return counted


def allowed(kind: str, batch: str, do_sample: bool, draft_steps: int) -> tuple[int, int]:
    """How often the host may wait in a round: one transfer, but for what the drafter asks besides."""
    if kind.startswith("disco"):  # its rules read each token that they may stop at
        return 0, 1 + draft_steps
    if kind == "pearl" and do_sample:  # the target's own token is drawn once it is known what was rejected
        return 1, 2
    if kind == "streaming, pruned":  # in mid-forward, of how many nodes go; by judge and session, of which went
        return 0, 4
    if kind == "streaming, copies" or (kind == "hybrid" and not do_sample):  # to join it with what was said before
        return 0, 2
    return 1, 1
