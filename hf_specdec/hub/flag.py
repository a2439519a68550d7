"""`speculation_type` and `speculation` of a `GenerationConfig` → a drafter, loaded once per target and reused."""

import json
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ..config import DrafterConfig
from ..errors import SpeculationError
from .loading import load_drafter
from .registry import Storable, drafter_class

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# What `speculation={"drafter": ...}` may carry beside the drafter's own options.
LOADING_OPTIONS = (
    "revision", "subfolder", "cache_dir", "local_files_only", "dtype", "device_map", "quantization", "pack_linear",
)  # fmt: skip

MOST_DRAFTERS = 8
"""kept per target"""


class Recent:
    """Drafters by key; beyond `most` the least recently used is forgotten, and ends when no call uses it any more."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._made: dict[Hashable, tuple[Any, Future[Storable]]] = {}  # the latest last
        self._lock = threading.Lock()  # never held while a drafter is made

    def get(self, key: Hashable, assistant: Any, make: Callable[[], Storable]) -> Storable:
        """The drafter of this key over this draft model, from `make` if it is not here.

        Who asks for one that is being made waits for it, and gets its error if it fails; nobody else waits.
        """
        with self._lock:
            known, drafter = self._made.pop(key, (None, None))
            mine = drafter is None or known is not assistant
            drafter = Future() if drafter is None or mine else drafter
            self._made[key] = assistant, drafter
        if mine:
            self._fill(key, drafter, make)
        return drafter.result()

    def _fill(self, key: Hashable, drafter: "Future[Storable]", make: Callable[[], Storable]) -> None:
        try:
            drafter.set_result(make())
        except BaseException as error:
            with self._lock:
                if key in self._made and self._made[key][1] is drafter:
                    del self._made[key]  # the next call tries anew
            drafter.set_exception(error)
        else:
            with self._lock:
                for oldest in list(self._made)[: -self.most]:
                    del self._made[oldest]


_drafters: "WeakKeyDictionary[PreTrainedModel, Recent]" = WeakKeyDictionary()
_lock = threading.Lock()


def drafter_from_flag(
    target: "PreTrainedModel",
    speculation_type: str,
    speculation: dict[str, Any] | None = None,
    assistant_model: "PreTrainedModel | None" = None,
) -> Storable:
    """The drafter that a `GenerationConfig` asks for.

    Args:
        target: the model that `generate` was called on.
        speculation_type: a registered `drafter_type`.
        speculation: the drafter's options, or `{"drafter": repo or folder}` with options that override the stored ones
            and with what `Drafter.from_pretrained` takes for loading (`LOADING_OPTIONS`).
        assistant_model: the draft model, for drafters over one.

    Returns:
        The same drafter for the same target, options and draft model, as long as the target lives and it is among the
        last `MOST_DRAFTERS` asked for. Per set of options the last draft model only is kept.

    Raises:
        SpeculationError: an unknown type or option, no draft model where one is needed, or one where none is.
    """
    cls = drafter_class(speculation_type)
    options = _checked_options(cls.config_class, speculation)
    if assistant_model is not None and not cls.takes_draft_model:
        raise SpeculationError(
            f"speculation_type={speculation_type!r} drafts without a model, but assistant_model is a "
            f"{type(assistant_model).__name__}; leave assistant_model out, or use speculation_type='draft_model'"
        )
    if speculation_type == "draft_model" and "drafter" not in options and assistant_model is not None:
        options = _assistant_defaults(assistant_model) | options
    key = (speculation_type, json.dumps(options, sort_keys=True))
    with _lock:
        recent = _drafters.setdefault(target, Recent(MOST_DRAFTERS))
    return recent.get(key, assistant_model, lambda: _make(cls, options, assistant_model))


def _checked_options(config_class: type[DrafterConfig], speculation: dict[str, Any] | None) -> dict[str, Any]:
    """A plain JSON dict of known names."""
    name = config_class.drafter_type
    if speculation is None:
        return {}
    if not isinstance(speculation, dict):
        raise SpeculationError(
            f"speculation must be a dict of options for speculation_type={name!r}, got {type(speculation).__name__}"
        )
    known = ["drafter", *config_class.options()]
    if "drafter" in speculation:
        known += LOADING_OPTIONS
    if unknown := sorted(set(map(str, speculation)) - set(known)):
        raise SpeculationError(
            f"unknown option {', '.join(map(repr, unknown))} in speculation for speculation_type={name!r}; "
            f"its options are: {', '.join(known)}"
        )
    try:
        return json.loads(json.dumps(speculation))
    except (TypeError, ValueError) as error:
        raise SpeculationError(f"speculation must hold plain JSON values, so that it can be saved: {error}") from error


def _make(cls: type[Storable], options: dict[str, Any], assistant: "PreTrainedModel | None") -> Storable:
    if "drafter" in options:
        loading = {name: value for name, value in options.items() if name != "drafter"}
        if assistant is not None:
            loading["draft_model"] = assistant
        return load_drafter(cls, options["drafter"], **loading)
    if cls.needs_draft_model and assistant is None:
        raise SpeculationError(
            f"speculation_type={cls.config_class.drafter_type!r} needs a draft model, and none was given; pass "
            f'assistant_model=<a small model>, or speculation={{"drafter": <a repo or folder that names one>}}; '
            "if the model's own config names one, import hf_specdec before loading the model"
        )
    try:
        return cls(*[assistant] * cls.takes_draft_model, **options)
    except MemoryError as error:
        raise SpeculationError(
            f"there is not enough memory for speculation={options} ({error}); lower its options"
        ) from error


def _assistant_defaults(assistant: "PreTrainedModel") -> dict[str, Any]:
    """The draft length that transformers users set on their assistant; refuses what has no meaning here."""
    stored: Any = getattr(assistant, "generation_config", None)
    if getattr(stored, "assistant_confidence_threshold", None):
        raise SpeculationError(
            "assistant_model.generation_config.assistant_confidence_threshold="
            f"{stored.assistant_confidence_threshold} is not used by speculation_type='draft_model'; set it to None, "
            "or use a drafter that stops by confidence (speculation_type='disco')"
        )
    if getattr(stored, "num_assistant_tokens_schedule", None) not in (None, "constant"):
        raise SpeculationError(
            "assistant_model.generation_config.num_assistant_tokens_schedule="
            f"{stored.num_assistant_tokens_schedule!r} is not used by speculation_type='draft_model'; "
            "set it to None or 'constant'"
        )
    length = getattr(stored, "num_assistant_tokens", None)
    return {} if length is None else {"num_draft_tokens": length}
