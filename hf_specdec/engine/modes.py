"""In which way a call can be sped up, if it can."""

from typing import Any, NamedTuple

from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import StaticLayer

from ..errors import warn
from ..target.cache import is_adoptable
from ..target.capturable import hindered, sums_by_distance, wants_captured, why_not_captured
from ..target.captured import CapturedRunner
from ..target.compiled import compiles
from ..target.inputs import CACHE, cached_columns, own_cache, ropes, takes_ragged_inputs
from ..target.lockstep import LockstepRunner
from ..target.probe import Support
from ..target.ragged import RaggedRunner
from ..target.state import StateRunner
from ..target.stock import changed_cache, why_plain
from .call import Call, PlainDecodingNeeded
from .guard import GuardedDrafter
from .outputs import StepOutputs

NOT_COMPILED = (
    "is compiled, and drafts are verified by its uncompiled forward: in this call it would be compiled for each width. "
    "The text is not affected"
)
UNRECORDABLE = "the drafter changes them in a way that cannot be recorded"


class Mode(NamedTuple):
    """In which way a call is sped up."""

    ragged: bool
    """each row advances at its own pace; otherwise all rows together, as plain decoding does"""
    trees: bool
    """whether drafts may be trees"""
    runner: type[LockstepRunner | RaggedRunner]
    """the engine's runner; `RaggedRunner` where trees or rows of any lengths may come"""
    note: str = ""
    """why forwards are not captured, where that was asked for or is usual"""

    @property
    def name(self) -> str:
        """As statistics say it."""
        return "staggered" if self.staggered else "ragged" if self.ragged else "lockstep"

    @property
    def staggered(self) -> bool:
        """Whether rows get ahead of each other over a runner that wants equal ones."""
        return self.ragged and not issubclass(self.runner, RaggedRunner)


def choose_mode(call: Call, drafter: GuardedDrafter) -> Mode:
    """How to run a call; or `PlainDecodingNeeded`."""
    mode = _mode(call, drafter)
    if call.notice:
        warn(call.notice)
    if compiles(call.target) and mode.runner is not CapturedRunner:
        warn(f"{type(call.target).__name__} {NOT_COMPILED}")
    return mode


def _mode(call: Call, drafter: GuardedDrafter) -> Mode:
    both = call.model_kwargs.get(CACHE)
    cache = own_cache(both)
    name = type(call.target).__name__
    if (beams := call.config.num_beams or 1) > 1:
        raise PlainDecodingNeeded(call, f"num_beams={beams}, and drafts do not make beam search faster")
    if why := why_plain(call.target):
        raise PlainDecodingNeeded(call, f"{name} {why}")
    if why := lacks(call, both) or changed_cache(both):
        raise PlainDecodingNeeded(call, f"speculation needs a cache that can be rolled back, and {why}")
    if isinstance(both, EncoderDecoderCache) != (call.source is not None):
        raise PlainDecodingNeeded(
            call, f"{name} was given a {type(both).__name__} as its cache, which does not fit it; leave {CACHE} out"
        )
    if call.config.prefill_chunk_size is not None:
        raise PlainDecodingNeeded(
            call, "prefill_chunk_size is set, but speculation reads the prompt in one piece; leave it out"
        )
    if rope_changes(call):
        raise PlainDecodingNeeded(
            call,
            "the text may grow past the length at which this model's rotary embeddings change; lower max_new_tokens",
        )
    can, _, why = call.ability
    if can is Support.PLAIN:
        raise PlainDecodingNeeded(call, f"{name} {why}")
    if unread := drafter.why_not(call.input_ids, call.source):
        raise PlainDecodingNeeded(call, unread)
    if call.source is not None:
        return _beside_an_encoder(call, drafter)
    alone = call.input_ids.shape[0] == 1
    takes_ragged = can is Support.RAGGED and takes_ragged_inputs(call.target, call.model_kwargs)
    takes_ragged = takes_ragged and not cache.offloading and (not cache.layers or is_adoptable(cache))
    if not takes_ragged and not alone:
        if can is Support.LOCKSTEP and _may_be_staggered(call, drafter):
            return Mode(True, False, LockstepRunner)
        what = f"{name} {why or 'was given inputs, or a cache, that do not allow rows of different lengths'}"
        what = "the cache is offloaded to the host" if cache.offloading else what
        warn(
            f"the batch advances at the pace of its slowest row: {what}. The text is not affected; smaller batches "
            "gain more"
        )
    wanted = drafter.proposes_trees or drafter.brings_runner
    ragged = takes_ragged and call.may_be_ragged() and drafter.takes_ragged() and (wanted or not alone)
    blocks = not call.processing.opaque and not StepOutputs.wanted(call.config)
    trees = ragged or (takes_ragged and wanted and blocks)
    states = call.config.return_dict_in_generate and (call.config.output_hidden_states or call.config.output_attentions)
    own_runner = takes_ragged and drafter.brings_runner and not states
    note = ""
    if wants_captured(call.rules.forwards, call.target):
        bitwise = call.rules.forwards == "bitwise"
        why = why_eager(call, can, takes_ragged, bool(states), drafter.recordable)
        if bitwise and own_runner:
            why = why or "what the drafter adds to them changes their shape"
        if bitwise and compiles(call.target):
            why = why or f"{name} is compiled, for each shape in another way"
        if not why:  # a tree's tokens lie in another order than a text's, and are not always summed in its order
            return Mode(ragged, trees and (not bitwise or sums_by_distance(call.target)), CapturedRunner)
        note = f"forwards are not captured: {why}"
        if bitwise:
            raise PlainDecodingNeeded(call, note)
    if trees or own_runner:
        return Mode(ragged, trees, RaggedRunner, note)
    return Mode(ragged, trees, StateRunner if can is Support.STATE else LockstepRunner, note)


def why_eager(call: Call, can: Support, takes_ragged: bool, states: bool, recordable: bool) -> str:
    """Why a call's forwards are not captured; empty if they are.

    Args:
        recordable: whether a drafter's own runner is, if it brings one.
    """
    name = type(call.target).__name__
    if can is not Support.RAGGED:
        return f"{name} {call.ability.why}"
    if not takes_ragged:
        return f"{name} {hindered(call.target) or 'was given inputs, or a cache, that static buffers do not hold'}"
    if states:
        return "the call returns hidden states or attentions"
    if not recordable:
        return UNRECORDABLE
    why = why_not_captured(call.target)
    return f"{name} {why}" if why else ""


def lacks(call: Call, given: Any) -> str:
    """What a call's cache lacks, so that neither it nor a dynamic one in its place can be rolled back; empty where one
    can."""
    if call.config.use_cache is False or given is None:
        return "this call uses no cache; leave use_cache at True"
    if isinstance(cache := own_cache(given), DynamicCache):
        return ""
    if not isinstance(given, StaticCache):
        return f"a {type(cache).__name__} cannot be; use the default cache"
    whole = all(type(layer) is StaticLayer for layer in given.layers)
    lengths = [layer.max_cache_len for layer in given.layers if type(layer) is StaticLayer]
    most = call.stopping.max_length
    if given.offloading:
        return (
            "an offloaded static cache saves the memory that speculation would need for a second cache; use "
            "another cache"
        )
    if not whole and (call.keeps_cache or cached_columns(given)):
        return "a static cache with sliding or recurrent layers cannot be; use the default cache"
    if most is None or most - 1 + call.unnamed > min(lengths, default=2**31):
        return "the static cache is shorter than the text may become; lower max_new_tokens, or make the cache longer"
    return ""


def _beside_an_encoder(call: Call, drafter: GuardedDrafter) -> Mode:
    """The rows of an encoder-decoder have one length in its cache, by which positions are counted."""
    states = call.config.return_dict_in_generate and (call.config.output_hidden_states or call.config.output_attentions)
    if states or call.model_kwargs[CACHE].get_seq_length():
        what = (
            "speculation does not return its hidden states and attentions"
            if states
            else "speculation cannot continue its cache"
        )
        raise PlainDecodingNeeded(call, f"{type(call.target).__name__} is an encoder-decoder, and {what}")
    return Mode(_may_be_staggered(call, drafter), False, LockstepRunner)


def _may_be_staggered(call: Call, drafter: GuardedDrafter) -> bool:
    """Whether rows may get ahead of each other: nobody wants the cache, whose rows have one length, and no layer of it
    is on its way from the host when rows leave."""
    free = not call.keeps_cache and not own_cache(call.model_kwargs[CACHE]).offloading
    return call.input_ids.shape[0] > 1 and free and call.may_be_ragged() and drafter.takes_ragged()


def rope_changes(call: Call, joined: bool = False) -> bool:
    """Whether position embeddings depend on the length reached: a block of tokens would cross it all at once, and rows
    on both sides of it go by the longest.

    Args:
        joined: whether the call shares its forwards with rows of others, and its prompt is read in pieces.
    """
    config: Any = call.target.config.get_text_config(decoder=True)
    before = cached_columns(call.model_kwargs[CACHE])
    held = before if call.new_columns is None else 0
    mask = call.model_kwargs.get("attention_mask")
    for rope in ropes(call.target):
        limit = getattr(config, "max_position_embeddings", None)
        start = int(rope.get("original_max_position_embeddings") or limit or 2**31)
        end = held + (call.stopping.max_length or 2**31) + call.unnamed
        if rope.get("rope_type") == "dynamic" and end > start:
            return True
        if rope.get("rope_type") == "longrope" and end > start:
            columns = held + call.input_ids.shape[1] + call.unnamed
            shortest = columns if mask is None else int(mask.sum(-1).min())
            if joined or shortest <= start or 0 < before <= start:
                return True
    return False
