"""transformers' own beam search, over a target that has looked ahead.

Beam search asks for the logits behind its w beams, chooses w beams, and asks again. Whoever guesses which ones it will
choose can have the target read them in advance: a draft model goes on with its own beams of width u ≥ w for γ steps,
helped by what the target said behind the same words before, and one forward reads what was found. As long as all w
beams are among them, the next questions are answered from that forward. What is chosen, and when it ends, is
transformers' code alone: sequences and scores are its own.
"""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from ...clock import now
from ...errors import SpeculationError, shown, warn
from ...stats import SpeculationStats, text_length
from ...target.inputs import CACHE, position_limit, ropes, takes_ragged_inputs
from ...target.masks import attention_windows
from ...target.probe import Support, ability
from .recalled import Recalled
from .tree import Path, TreeModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NO_INPUTS = {"next_sequence_length", "tokenizer", "assistant_tokenizer", "assistant_model", "streamer", "synced_gpus"}
"""what transformers' search hands on that is not the model's"""
STEPS = 4
"""γ, where the drafter's window is not a number"""
WIDEST, WIDER = 8, 4
"""u as a multiple of w, at the first step, and at those behind it. All w texts have to be foretold at the first, or
nothing behind it is of use"""


def why_not(target: "PreTrainedModel", draft: Any) -> str:
    """Why a call with beams cannot be sped up; empty where it can."""
    if target.config.is_encoder_decoder:
        return "speculation does not support beam search with an encoder-decoder"
    if draft is None:
        return "beam search needs a draft model (DraftModelDrafter), and this drafter has none"
    for model in (target, draft):
        name, (can, _, why) = type(model).__name__, ability(model)
        if can is not Support.RAGGED:
            return f"{name} cannot read a tree of texts in one forward: it {why}"
        if any(attention_windows(model).values()) or _turns(model):
            return f"{name} cannot read a tree of texts in one forward"
    return ""


def _turns(model: "PreTrainedModel") -> bool:
    """Whether rotary embeddings depend on the length reached, or a model has inputs of its own."""
    changing = any(rope.get("rope_type") in ("dynamic", "longrope") for rope in ropes(model))
    return changing or "prepare_inputs_for_generation" in vars(model)


class Search(NamedTuple):
    """What a call asks of beam search."""

    beams: int
    """w"""
    window: Any
    """γ; another value than a number is `STEPS`"""
    ends: set[int]
    """tokens that end a text"""
    padding: int | None
    """what stands behind a text that has ended"""
    most: int
    """new tokens"""


class Lookahead:
    """What the target has said of texts that beam search may ask for."""

    def __init__(self, target: "PreTrainedModel", draft: "PreTrainedModel", search: Search) -> None:
        self.target, self.draft, self.beams = target, draft, search.beams
        self.ends, self.most = search.ends, search.most
        self.steps = search.window if isinstance(search.window, int) else STEPS
        self.stats = SpeculationStats(mode="beams", window=self.steps)
        self.dropped = ""

    def begin(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Read the prompts [B · w, P], w times the same; logits [B · w, V] behind them."""
        began = now()
        self.columns, ids = ids.shape[1], ids[:: self.beams]
        mask = torch.ones_like(ids) if mask is None else mask[:: self.beams]
        self.reader = TreeModel(self.target, ids, mask)
        longest = int(mask.sum(1).max())
        self.most = min(self.most, position_limit(self.target) - longest)
        self.guesser: TreeModel | None = None
        if longest < position_limit(self.draft):
            try:
                self.guesser = TreeModel(self.draft, ids, mask)
            except Exception as error:
                self._drop(error)
        first = self.reader.prompt
        self.known: list[dict[Path, Tensor]] = [{(): row} for row in first]
        self.worth: list[dict[Path, float]] = [{(): 0.0} for _ in first]
        """log-probabilities of the texts asked for, as the target sees them"""
        self.recalled = Recalled()
        self.run = 0
        """questions that the last forward has answered"""
        self.stats.target_calls, self.stats.prefill_seconds = 1, now() - began
        return first.repeat_interleave(self.beams, dim=0)

    def answer(self, ids: Tensor) -> Tensor:
        """Logits [B · w, V] behind texts [B · w, P + n]."""
        texts = [tuple(row) for row in ids[:, self.columns :].tolist()]
        asked = [list(dict.fromkeys(texts[i : i + self.beams])) for i in range(0, len(texts), self.beams)]
        self._weigh(asked)
        self.stats.plain_steps += 1
        if any(path not in known for known, paths in zip(self.known, asked, strict=True) for path in paths):
            self._note()
            self._look_ahead(asked)
        else:
            self.run += 1
        return torch.stack([self.known[i // self.beams][path] for i, path in enumerate(texts)])

    def _weigh(self, asked: list[list[Path]]) -> None:
        """How likely each text is, from what was said of it without its last token."""
        for b, paths in enumerate(asked):
            said = {path[:-1]: self.known[b][path[:-1]].float().log_softmax(-1) for path in paths}
            self.worth[b] = {p: self.worth[b][p[:-1]] + float(said[p[:-1]][p[-1]]) for p in paths}

    def _look_ahead(self, asked: list[list[Path]]) -> None:
        """Read what is asked for, and what may be asked for next."""
        began = now()
        guessed = self._guessed(asked)
        drafted = now()
        self.reader.keep([[p if self.reader.holds(b, p) else p[:-1] for p in paths] for b, paths in enumerate(asked)])
        wanted = []
        for b, paths in enumerate(asked):
            new = [path for path in paths if not self.reader.holds(b, path)]
            wanted.append(new + [path for path in guessed[b] if not self.reader.holds(b, path) and path not in new])
        logits = self.reader.read(wanted)
        for b, paths in enumerate(asked):
            held = {path: self.known[b][path] for path in paths if path in self.known[b]}
            self.known[b] = held | {path: logits[b, i] for i, path in enumerate(wanted[b])}
            if self.guesser is not None:
                self.recalled.remember(wanted[b], logits[b, : len(wanted[b])])
        self.stats.target_calls += 1
        self.stats.row_steps += 1
        self.stats.verify_widths[logits.shape[1]] += 1
        self.stats.draft_seconds += drafted - began
        self.stats.verify_seconds += now() - drafted

    def _guessed(self, asked: list[list[Path]]) -> list[list[Path]]:
        """By the draft's own beam search, parents before children. A draft that fails is not asked again."""
        if self.guesser is None:
            return [[] for _ in asked]
        try:
            return self._searched(self.guesser, asked)
        except Exception as error:
            self._drop(error)
            return [[] for _ in asked]

    def _drop(self, error: Exception) -> None:
        self.guesser = None
        self.dropped = (
            f"the draft model was dropped: it raised {shown(error)}. The text is not affected: the target finishes it "
            "without drafts"
        )
        warn(self.dropped)

    def _searched(self, guesser: TreeModel, asked: list[list[Path]]) -> list[list[Path]]:
        """γ steps with u beams per prompt, from the texts that are asked for on; as far as texts may be asked for, and
        the draft has positions."""
        n = len(asked[0][0])
        room = position_limit(self.draft) - max(guesser.lengths)
        steps = min(self.steps, self.most - 1 - n, room - n)
        if steps < 1:
            return [[] for _ in asked]
        roots = [
            [max((p[:n] for n in range(len(p) + 1) if guesser.holds(b, p[:n])), key=len) for p in paths]
            for b, paths in enumerate(asked)
        ]
        guesser.keep(roots)
        beams = [dict(worth) for worth in self.worth]
        missing = [_missing(guesser, b, paths) for b, paths in enumerate(asked)]
        found: list[list[Path]] = [[] for _ in asked]
        said: list[dict[Path, Tensor]] = [{} for _ in asked]
        for step in range(steps):
            if step:
                missing = [list(beam) for beam in beams]
            if any(missing):
                filled = [paths or [self._again(guesser, b)] for b, paths in enumerate(missing)]
                logits = guesser.read(filled)
                self.stats.draft_calls += 1
                for b, paths in enumerate(filled):
                    said[b] |= {path: logits[b, i] for i, path in enumerate(paths)}
            width = (WIDER if step else WIDEST) * self.beams
            beams = [self._best(beam, said[b], width) for b, beam in enumerate(beams)]
            for b, beam in enumerate(beams):
                found[b] += list(beam)
        return found

    def _again(self, guesser: TreeModel, b: int) -> Path:
        """Any node below what is settled, where a row has nothing to read."""
        return next(iter(self.worth[b]))

    def _best(self, beam: dict[Path, float], said: dict[Path, Tensor], width: int) -> dict[Path, float]:
        """The u = `width` likeliest texts one token on, none of which has ended."""
        paths = [path for path in beam if path in said]
        drafted = torch.stack([said[path].float() for path in paths])[:, : self.reader.vocab].log_softmax(-1)
        scores = self.recalled.mixed(paths, drafted)
        scores += torch.tensor([beam[path] for path in paths], device=scores.device)[:, None]
        scores[:, [end for end in self.ends if end < scores.shape[1]]] = -torch.inf
        values, places = scores.flatten().topk(min(width, scores.numel()))
        vocab = scores.shape[1]
        return {
            (*paths[place // vocab], place % vocab): value
            for value, place in zip(values.tolist(), places.tolist(), strict=True)
        }

    def _note(self) -> None:
        """What the last forward was good for."""
        if self.stats.target_calls > 1:
            self.stats.drafted_per_position.update(range(self.steps))
            self.stats.accepted_per_position.update(range(self.run))
            self.stats.rejections += self.run < self.steps
        self.run = 0


def _missing(tree: TreeModel, b: int, paths: list[Path]) -> list[Path]:
    """What has to be read so that there are logits behind these texts: the last token again, where all is held."""
    new = sorted({p[:n] for p in paths for n in range(1, len(p) + 1) if not tree.holds(b, p[:n])}, key=len)
    return new + [p for p in paths if p not in new]


class _Answering:
    """Put before a target's class: whoever runs it is answered by a lookahead."""

    lookahead: Lookahead

    def prepare_inputs_for_generation(self, ids: Tensor, is_first_iteration: bool = False, **kwargs: Any) -> Any:
        return {"asked": ids, "first": is_first_iteration, "given": kwargs}

    def __call__(self, asked: Tensor, first: bool, given: dict[str, Any], **_: Any) -> ModelOutput:
        ahead = self.lookahead
        if first and not takes_ragged_inputs(ahead.target, {k: v for k, v in given.items() if k not in NO_INPUTS}):
            raise SpeculationError(
                "beam search with a drafter takes token ids only, and this call has other inputs; leave the drafter out"
            )
        logits = ahead.begin(asked, given.get("attention_mask")) if first else ahead.answer(asked)
        return ModelOutput(logits=logits[:, None])


def search_beams(
    generate: Callable[..., Any],
    target: "PreTrainedModel",
    draft: "PreTrainedModel",
    search: Search,
    arguments: dict[str, Any],
) -> tuple[Any, SpeculationStats]:
    """What `generate(target, **arguments)` gives with beams, in fewer calls of the target.

    Args:
        generate: transformers' own.

    Returns:
        The output, and what it took.
    """
    began = now()
    ahead = Lookahead(target, draft, search)
    standing = copy.copy(target)  # the same modules under another class: the target itself is not touched
    standing.__class__ = type(type(target).__name__, (_Answering, type(target)), {})
    standing.__dict__.pop("forward", None)
    standing.__dict__["lookahead"] = ahead
    with torch.no_grad():
        output = generate(standing, **arguments)
    ahead._note()
    stats = ahead.stats
    stats.total_seconds = now() - began
    texts = output.sequences if isinstance(output, ModelOutput) else output
    stats.emitted_tokens = sum(
        text_length(text, search.ends, search.padding) for text in texts[:, ahead.columns :].tolist()
    )
    stats.notes += filter(None, [ahead.dropped])
    if isinstance(output, ModelOutput):
        output[CACHE] = None  # the tree is no cache that anybody could go on from
    return output, stats
