"""`CapturedRunner`: rows in static buffers, forwards of a few fixed widths, replayed where the device can."""

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ..budget import FORESIGHT, padded_to
from ..errors import SpeculationError, warn
from ..protocol import Feature, FedTree, Finder, Forward, Found
from .buffers import NO_MEMORY, WIDEST, WIDTHS, power_of_two, slots_for
from .cache import RaggedCache
from .captured_cache import CapturedCache
from .compiled import compiles
from .devices import input_device
from .features import shown
from .fingerprint import is_looked_on, replaced
from .fused import fused
from .inbox import Inbox, Tokens
from .inputs import CACHE, as_when_decoding, mixes_experts, position_limit, prompt_is_stock
from .joining import read_at_once
from .layout import begin
from .ragged import RaggedRunner, Reader
from .recorded import RECORDERS, is_at_once
from .remembered import Remembered
from .rounding import TEXT, TRIED, widths_alike

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")

MOST_AHEAD = 1024
"""new tokens that buffers have room for from the start, of calls that may come to so many"""

CHUNKS = (64, 128, 256, 512)
"""tokens of all rows in a forward of a prompt that is recorded: fewer take a device as long"""
MOST_READ = 2048
"""tokens of all rows of such a prompt: over more of them the device computes for longer than a host launches"""

Choose = Callable[[Tensor, Tensor | None], tuple[Tensor, ...]]

_alike: Remembered[tuple[int, ...]] = Remembered()
"""widths that round alike, by the shape of buffers"""


class Captured(RaggedRunner):
    """A `RaggedRunner` whose forwards read and write `Buffers`. Tokens are padded to the next of a few widths, rows to
    a power of two; what is padded is masked, and overwritten by the next forward."""

    cache: CapturedCache  # type: ignore[assignment]
    pads_to: Sequence[int] = WIDTHS

    def answer(self, tokens: Tensor, parents: Sequence[Sequence[int]] | None) -> Forward:
        if not self.is_captured:
            return super().answer(tokens, parents)

        def step(fed: Tensor, seen: Tensor | None, depth: Tensor) -> tuple[Tensor, ...]:
            outputs = self.read(fed, seen, depth)
            return self.shared(outputs.logits), *shown(outputs, self.features, fed.shape[1], self.cache.slots).values()

        logits, *states = self.over(tokens, parents, step, tuple(self.features))
        return Forward(logits, features=dict(zip(dict.fromkeys(self.features), states, strict=True)))

    @property
    def is_captured(self) -> bool:  # type: ignore[override]
        """Whether the rows are in buffers. Else there was no memory for them, or they are wanted no more."""
        return isinstance(self.cache, CapturedCache)

    @property
    def widths(self) -> Sequence[int]:  # type: ignore[override]
        return self.pads_to if self.is_captured else ()

    def computing(self, width: int) -> Any:
        """What is recorded is fused from the first time on, that it rounds alike. Whoever looks on sees wide ones."""
        if not self.is_captured or width not in self.widths:
            return super().computing(width)
        return self.model if compiles(self.model) or replaced(self.model) is not None else self.fused

    @cached_property
    def fused(self) -> Any:
        return fused(self.model)

    def shared(self, logits: Tensor) -> Tensor:
        return self.cache.buffers.shared(logits)

    def over(
        self,
        tokens: Tensor,
        parents: Sequence[Sequence[int]] | None,
        step: Reader[Any],
        key: Hashable = None,
        slots_per_token: int = 1,
    ) -> Any:
        if not self.is_captured:
            return super().over(tokens, parents, step, key, slots_per_token)

        def stepped(inbox: Inbox, tree: FedTree | None) -> Any:
            return step(inbox.tokens, *self._seen(inbox, tree))

        rows, width = tokens.shape
        found = self._fed(tokens, parents, (), stepped, key, slots_per_token)
        return tuple(each[:rows, :width].clone() for each in found)  # the next replay writes over them

    def find(
        self, tokens: Tokens, parents: Sequence[Sequence[int]] | None, counted: Sequence[int], finder: Finder
    ) -> Forward:
        """As `forward`, with what a finder finds, and no logits: their shape is. Of a tree only the path that it keeps
        is in the cache then.

        Args:
            counted: [B] nodes of each row's draft.
        """

        def stepped(inbox: Inbox, tree: FedTree | None) -> tuple[Found, dict[Feature, Tensor]]:
            outputs = self.read(inbox.tokens.clamp(0, finder.vocab - 1), *self._seen(inbox, tree))
            states = shown(outputs, self.features, inbox.width, self.cache.slots)  # as fed: keys are moved below
            found, buffers = finder(outputs.logits, inbox.tokens, inbox.counted, tree), self.cache.buffers
            if tree is not None:
                places = torch.arange(inbox.width, device=buffers.device)
                buffers.move(*(inbox.ends[:, None] + after for after in (places, found.kept)))
            return found, states

        rows, width = len(tokens), len(tokens[0])
        found, states = self._fed(tokens, parents, counted, stepped, (finder, *self.features))
        self.cache.slots.advance(width)
        features = {name: each[:rows, :width].clone() for name, each in states.items()}
        nothing = torch.empty((), device=found.n.device).expand(rows, width, finder.vocab)
        return Forward(nothing, features=features, found=Found(*[each[:rows] for each in found]))

    def _fed(
        self,
        tokens: Tokens,
        parents: Sequence[Sequence[int]] | None,
        counted: Sequence[int],
        step: Callable[[Inbox, FedTree | None], T],
        key: Hashable,
        slots_per_token: int = 1,
    ) -> T:
        """What a step gives of an inbox with these tokens [B, T]. Equal keys mean equal steps."""
        rows, width = len(tokens), len(tokens[0])
        padded = padded_to(self.widths, width)
        buffers, is_kept = self.cache.with_room(padded * slots_per_token), padded in self.widths
        inbox = Inbox.of(buffers, padded, parents is not None, is_kept)
        inbox.fill(tokens, self.cache.to_tell(), counted, parents)

        def stepped() -> T:
            buffers.ends.copy_(inbox.ends)
            return step(inbox, inbox.tree())

        return self._run((padded, parents is None, key), stepped, rows, width) if is_kept else stepped()

    def _seen(self, inbox: Inbox, tree: FedTree | None) -> tuple[Tensor | None, Tensor]:
        """What `shape` says."""
        return self.shape(None, inbox.width) if tree is None else (tree.seen, tree.depth)

    def chain(
        self,
        first: Tensor,
        count: int,
        numbers: Tensor | None,
        choose: Choose,
        key: Hashable,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """So many steps in a row, as one: feed a token, choose the next from its logits, feed that.

        Args:
            first: [B, F] the first one or two tokens.
            numbers: [B, count] random ones for the steps.
            choose: the next token [B] or [B, k], the first of which is fed, and more, from logits [B, V] and numbers
                [B]. Equal for equal keys.
            lengths: [B] slots that count, no more than the host knows of, where it does not know yet how many less.
                It is told later, by `truncate`.

        Returns:
            What was chosen: [B, count, ...] of each.
        """
        rows, begun = first.shape
        others = FORESIGHT if is_at_once() else ()
        buffers = self.cache.with_room(begun + max(count, *others, 0))
        began = buffers.put("first", first, begun)
        drawn = None if numbers is None else buffers.put("numbers", numbers, WIDEST)
        if lengths is None:
            self.cache.tell()
        else:
            self.cache.take(lengths)

        def steps(count: int) -> list[Tensor]:
            fed, chosen, done = began, [], 0
            try:
                for i in range(count):
                    logits = self.read(fed, None, buffers.chain[:, : fed.shape[1]]).logits[:, -1]
                    chosen.append(choose(logits, None if drawn is None else drawn[:, i]))
                    buffers.ends.add_(fed.shape[1])
                    done += fed.shape[1]
                    fed = chosen[-1][0].reshape(buffers.rows, -1)[:, :1]
            finally:
                buffers.ends.sub_(done)  # as it was: a step can be run again
            return [torch.stack(several, 1) for several in zip(*chosen, strict=True)]

        for each in others:
            if self.cache.will_record(("chain", begun, each, key)):
                self._run(("chain", begun, each, key), partial(steps, each), rows, 1, each)
        chosen = self._run(("chain", begun, count, key), partial(steps, count), rows, 1, count)
        if lengths is None:
            self.cache.slots.advance(begun + count - 1)
        return tuple(several[:rows].clone() for several in chosen)

    def _run(self, key: Hashable, step: Callable[[], T], rows: int, width: int, times: int = 1) -> T:
        """A step, recorded or not, for whoever looks on."""
        watched = vars(self.model).get("forward")
        if watched is None and not compiles(self.model):
            return self.cache.run(key, step)
        if getattr(watched, "replayed", None) is None:  # compiled, or put there in mid-call and not to be missed
            return step()
        return watched.replayed(lambda: self.cache.run(key, step), rows, width, max(self.cache.lengths), times)

    def _as_plainly(self, width: int) -> bool:
        """Never: slots behind a row's end are there from the start."""
        return False


class CapturedRunner(Captured):
    """All rows of a call, which may leave."""

    most_slots = 0
    """that the text may come to take, where that is known: else buffers grow"""
    bitwise = False
    """whether all forwards are of one shape: at widths that round alike, with rows that have left and slots that are
    not needed yet"""

    def expect(self, most_columns: int) -> None:
        """The text may come to so many columns."""
        self.most_slots = min(most_columns, position_limit(self.model))
        if not self.bitwise:
            self.most_slots = min(self.most_slots, self.prompt.shape[1] + MOST_AHEAD)

    def prefill(self) -> Forward:
        """The prompt's forward, as plain decoding does it; or in chunks, where the device can record them."""
        if not self._begun():
            return super().prefill()
        self.adopt(self.prompt.shape[1])
        if not self.is_captured:
            return super().prefill()
        decoding, widths = self.pads_to, [max(1, tokens // self.cache.rows) for tokens in CHUNKS]
        for width in widths if is_at_once() else ():
            self._record(width)
        self.pads_to, columns, most = widths, self.prompt.shape[1], widths[-1]
        read = [self._read(start, min(start + most, columns)) for start in range(0, columns, most)]
        self.pads_to = decoding
        states = {name: torch.cat([each.features[name] for each in read], 1) for name in self.features}
        return Forward(read[-1].logits, features=states)

    def _begun(self) -> bool:
        """Whether the prompt is to be recorded; then the stock cache has layers, of no columns yet."""
        if input_device(self.model).type not in RECORDERS:
            return False
        used = self.new_columns is not None or self.stock.get_seq_length() > 0
        tokens = power_of_two(len(self.rows)) * self.prompt.shape[1]
        if used or tokens > MOST_READ or self.model_kwargs.get("inputs_embeds") is not None or self.bitwise:
            return False
        if compiles(self.model) or mixes_experts(self.model) or not prompt_is_stock(self.model):
            return False
        if any(map(is_looked_on, self.model.modules())):  # for the prompt alone
            return False
        return begin(self.stock, self.model, len(self.rows))

    def _record(self, width: int) -> None:
        """A chunk of this width, for prompts of other lengths."""
        if width <= self.cache.buffers.slots:
            self.pads_to = [width]
            self._read(0, min(width, self.prompt.shape[1]))
            self.cache.set_lengths([0] * len(self.rows))

    def _read(self, start: int, end: int) -> Forward:
        """The prompt's columns from `start` to `end`, with the logits behind the last of them."""

        def stepped(inbox: Inbox, tree: FedTree | None) -> tuple[Tensor, dict[Feature, Tensor]]:
            positions = self.cache.buffers.input("positions", inbox.width, dtype=torch.long)
            last = inbox.counted[:1]
            outputs = self.read(inbox.tokens, *self._seen(inbox, tree), position_ids=positions, logits_to_keep=last)
            return self.shared(outputs.logits), shown(outputs, self.features, inbox.width, self.cache.slots)

        rows, width, padded = len(self.rows), end - start, padded_to(self.widths, end - start)
        positions = self.cache.with_room(padded).input("positions", padded, dtype=torch.long)
        positions[:rows, :width] = self.prompt_positions[:, start:end]
        key = "prompt", *self.features
        logits, states = self._fed(self.prompt[:, start:end], None, [width - 1], stepped, key)
        self.cache.slots.advance(width)
        features = {name: each[:rows, :width].clone() for name, each in states.items()}
        return Forward(logits[:rows].clone(), features=features)

    def _taken_over(self) -> RaggedCache:
        rows, columns = power_of_two(len(self.rows)), max(self.columns, self.most_slots)
        if self.bitwise:
            self.pads_to = alike(self.model, rows, columns, self.sums_by_distance)  # whose buffers are free then
        try:
            cache = CapturedCache(self.stock, [self.model], rows, columns)
            cache.whole = self.bitwise
            return cache
        except torch.OutOfMemoryError:
            if self.bitwise:
                raise
            warn(NO_MEMORY)
            return super()._taken_over()

    def select(self, rows: list[int]) -> None:
        """Go on with these rows of the batch; one may come twice."""
        if not self.is_captured:
            super().select(rows)
            return
        needed = power_of_two(max(len(rows), 1))
        if needed > self.cache.rows:
            self.cache.move(needed, max(self.cache.lengths))
        super().select(rows)
        if rows and needed < self.cache.rows and not (self.bitwise or compiles(self.model)):
            self.cache.move(needed, max(self.cache.lengths))


def alike(model: "PreTrainedModel", rows: int, columns: int, trees: bool) -> tuple[int, ...]:
    """Widths of forwards over buffers of such a shape that round alike. They are tried once.

    Args:
        trees: whether all sums are by distance, and trees are tried as well.

    Raises:
        SpeculationError: there are none, or the model has too few positions to try.
    """
    found = _alike.of(model, lambda: _tried(model, rows, columns, trees), (rows, slots_for(columns), trees))
    if not found:
        raise SpeculationError(
            "forwards='bitwise' is not possible here: a token's logits depend on where it stands among those that "
            "are verified with it, at every width; use another dtype, attention or device"
        )
    return found


def _tried(model: "PreTrainedModel", rows: int, columns: int, trees: bool) -> tuple[int, ...]:
    """The same, with texts behind a token that all rows begin with."""
    if (limit := position_limit(model)) < 1 + TEXT + max(TRIED):
        raise SpeculationError(
            f"forwards='bitwise' tries {TEXT + max(TRIED)} tokens behind another, and the model has positions for "
            f"{limit}; use other forwards"
        )
    ids = torch.zeros(rows, 1, dtype=torch.long, device=input_device(model))
    vocab = model.config.get_text_config(decoder=True).vocab_size

    def feed(tokens: Tensor, place: int, width: int, parents: list[list[int]] | None = None) -> Tensor:
        runner.cache.set_lengths([1 + place] * rows)
        runner.pads_to = [width]
        return runner.answer(tokens, parents).logits

    def branch(tokens: Tensor, place: int, width: int) -> Tensor:
        """Each token stands before another one, which leads nowhere."""
        path = list(range(0, 2 * tokens.shape[1], 2))
        parents = [max(node - 2, -1) for node in path for _ in range(2)]
        fed = torch.stack([tokens, (tokens + 1) % vocab], 2).flatten(1)
        logits = feed(fed, place, width, [parents] * rows)[:, path]
        runner.cache.keep([path] * rows)
        return logits

    with torch.no_grad(), as_when_decoding(model):
        runner = CapturedRunner(model, {CACHE: read_at_once(model, ids)}, ids)
        runner.most_slots, runner.sums_by_distance = columns, trees
        runner.adopt()
        runner.cache.whole = True
        return widths_alike(feed, rows, vocab, runner.cache.device, branch if trees else None)
