"""A drafter → what vLLM or SGLang starts with: a model folder where there is a draft model, and the command."""

import shutil
from pathlib import Path
from typing import Any

from huggingface_hub.utils import HFValidationError, validate_repo_id
from safetensors import SafetensorError

from ..config import DrafterConfig
from ..drafters.draft_model.cut import CutLlamaConfig, CutLlamaForCausalLM
from ..drafters.heads import EagleDrafter
from ..errors import SpeculationError
from ..hub.draft import PATTERNS, load_draft
from ..hub.files import HubSource, check_no_pickles, read_json, safe_file
from ..hub.loading import CARD, CONFIG, WEIGHTS, draft_folder
from ..hub.registry import SPECULATORS_TYPE
from ..tools.loading.drafters import config_of
from ..version import __version__
from .engines import AUTO, SPECULATORS, EngineDraft, check_known, start_command, target_name
from .speculators import write_head


def export_drafter(spec: str, engine: str, output: Path | None = None, draft: str | None = None) -> str:
    """Write what an engine loads.

    Args:
        spec: a drafter as commands take it.
        engine: "vllm", "sglang", or "speculators", a format that vLLM loads.
        output: a new or empty folder. None writes nothing, where nothing has to be.
        draft: folder or Hub repo of the draft model, in place of the drafter's own.

    Returns:
        The command that starts the engine. It is in the folder's `README.md`, too.

    Raises:
        SpeculationError: no such engine or drafter; the engine has no such way of drafting; a draft model that is
            missing, or has to be written and may not; a folder that holds something or cannot be written.
    """
    config, folder = config_of(spec)
    check_known(config, engine)
    if draft is not None and config.drafter_type != "draft_model":
        raise SpeculationError(f"--draft is for a draft_model drafter, and {spec!r} needs no model; leave it out")
    if output is not None and output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise SpeculationError(f"--output must be a new or an empty folder, got {str(output)!r}; name another one")
    try:
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
        model: EngineDraft | None = None
        notes: list[str] = []
        if config.drafter_type == "draft_model":
            model, notes = _draft(spec, config, folder, output, draft)
        elif config.drafter_type == "eagle3":
            model = _head(spec, config, folder, engine, output)
        command = start_command(config, engine, model)
        if output is not None:
            notes += _notes(config, engine)
            (output / CARD).write_text(_card(config, command, notes), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise SpeculationError(f"cannot write to --output {str(output)!r}: {error}; name another one") from error
    return command


def _draft(
    spec: str, config: DrafterConfig, folder: Path | None, output: Path | None, draft: str | None
) -> tuple[EngineDraft, list[str]]:
    """The draft model as the engine finds it, and what to know of it; written into `output` where it is no repo."""
    if draft is not None and not Path(draft).is_dir():
        return EngineDraft(_repo(draft)), []
    if draft is not None:
        source = Path(draft)
    elif folder is None:
        raise SpeculationError(f"{spec!r} names no draft model; name its folder or Hub repo with --draft")
    elif (pinned := _pinned(config.draft_model or {})) is not None:
        return pinned, []
    else:
        source = draft_folder(config, folder, HubSource(spec))
    if _is_cut(source):
        return _write_plain(source, output)
    if output is None:
        return EngineDraft(str(source)), []
    _copy(source, output)
    return EngineDraft(str(output)), []


def _copy(source: Path, output: Path) -> None:
    """A model as it is."""
    check_no_pickles(source)
    if not any(source.glob("model*.safetensors")):
        safe_file(source, WEIGHTS)  # says that it is missing
    for path in [path for pattern in PATTERNS for path in source.glob(pattern)]:
        shutil.copyfile(safe_file(source, path.name), output / path.name)


def _head(spec: str, config: Any, folder: Path | None, engine: str, output: Path | None) -> EngineDraft:
    """An EAGLE-3 head as the engine finds it; written into `output` in the format asked for."""
    if folder is None:
        raise SpeculationError(f"{spec!r} names no head; export the folder or Hub repo of one")
    source = folder if config.draft_model is None else draft_folder(config, folder, HubSource(spec))
    content = read_json(source, CONFIG)
    if content.get("mask_token_id") is not None:
        raise SpeculationError(f"{source} holds a P-EAGLE head, which is not exported; vLLM loads it from its own repo")
    as_asked = (SPECULATORS_TYPE in content) == (engine == SPECULATORS)
    if output is None and not as_asked and engine != "vllm":  # vLLM loads both
        raise SpeculationError(f"{source} is not in the format of {engine}; name a new folder for it with --output")
    if output is None:
        return EngineDraft(str(source))
    if engine != SPECULATORS:
        EagleDrafter.load_model(source).save_pretrained(output)
    elif as_asked:  # with what else it says of its target
        _copy(source, output)
    else:
        write_head(EagleDrafter.load_model(source), output, target_name(config), config.num_draft_tokens)
    return EngineDraft(str(output))


def _repo(name: str) -> str:
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise SpeculationError(f"--draft must be a folder or a Hub repo such as 'org/name', got {name!r}") from error
    return name


def _pinned(entry: dict[str, str]) -> EngineDraft | None:
    """A draft model in a Hub repo of its own, which the engine loads from there; None for others."""
    if entry.keys() != {"repo_id", "revision"}:
        return None
    repo, revision = entry["repo_id"], entry["revision"]
    cut = _is_cut(HubSource(repo, revision=revision).download([CONFIG]))
    return None if cut else EngineDraft(repo, revision)


def _write_plain(source: Path, output: Path | None) -> tuple[EngineDraft, list[str]]:
    """A cut draft as a Llama of the whole vocabulary."""
    if output is None:
        raise SpeculationError(
            f"{source} is a draft that was cut by `train draft`, and is written as a plain Llama for an engine; name "
            "a new folder for it with --output"
        )
    cut = load_draft(source)
    assert isinstance(cut, CutLlamaForCausalLM)
    cut.plain().save_pretrained(output)
    known, all_tokens = cut.config.known_tokens, cut.config.vocab_size
    return EngineDraft(str(output)), [
        f"The draft knows {known:,} of {all_tokens:,} tokens, and is a plain Llama here. Its logits of these tokens "
        "are unchanged. Any other token has the mean of them, so a greedy draft never holds it."
    ]


def _is_cut(folder: Path) -> bool:
    return read_json(folder, CONFIG).get("model_type") == CutLlamaConfig.model_type


def _notes(config: Any, engine: str) -> list[str]:
    notes = []
    if getattr(config, "num_draft_tokens", None) == "auto":
        notes.append(f"The drafter chooses how many tokens to draft; the engine drafts {AUTO}. Try other numbers.")
    if config.drafter_type == "suffix" and engine == "vllm":
        notes.append("vLLM's suffix decoding needs `pip install arctic-inference==0.1.1`.")
    return notes


def _card(config: DrafterConfig, command: str, notes: list[str]) -> str:
    lead = f"A `{config.drafter_type}` drafter, exported by hf_specdec {__version__}. The command that uses it:"
    return "\n\n".join(["# Exported drafter", lead, f"```sh\n{command}\n```", *notes]) + "\n"
