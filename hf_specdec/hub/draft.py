"""The draft model of a drafter: in a subfolder of its repo, in a pinned revision of another, or beside it."""

from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch
import transformers  # its auto classes and model families are loaded where they are asked for

from ..errors import SpeculationError, one_line, shortened, shown
from ..target import packing
from .files import (
    COMMIT_HASH,
    FLOATING,
    LIGHT,
    HubSource,
    TensorInfo,
    check_beside,
    check_no_pickles,
    check_relative,
    first_not_finite,
    naming,
    read_json,
    safe_file,
    tensor_infos,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

GENERATION = "generation_config.json"
PATTERNS = ("config.json", GENERATION, "model.safetensors.index.json", "model*.safetensors")
MOST_PER_WORD = 16
"""Parameters of 2 bits in a word of 32: what quantized weights pack at most."""
QUANTIZATIONS = ("int8", "int4")


FORMS = '{"subfolder": ...}, {"path": "../..."} or {"repo_id": ..., "revision": ...}, the last perhaps with "subfolder"'


def check_draft_entry(entry: Any, path: Path) -> None:
    """Refuse a `draft_model` entry that is none of `FORMS`."""
    keys = set(entry) if isinstance(entry, dict) else set()
    if keys not in ({"subfolder"}, {"path"}, {"repo_id", "revision"}, {"repo_id", "revision", "subfolder"}):
        raise SpeculationError(f"{path}: draft_model is {shown(entry)}; it must be {FORMS}")
    if "subfolder" in keys:
        check_relative(entry["subfolder"], f"{path}: draft_model.subfolder")
    if "path" in keys:
        check_beside(entry["path"], f"{path}: draft_model.path")
    if "repo_id" not in keys:
        return
    if not isinstance(entry["repo_id"], str):
        raise SpeculationError(
            f"{path}: draft_model.repo_id is {shown(entry['repo_id'])}; it must look like 'org/name'"
        )
    if not isinstance(entry["revision"], str) or not COMMIT_HASH.fullmatch(entry["revision"]):
        raise SpeculationError(
            f"{path}: draft_model.revision is {shown(entry['revision'])}; it must be a commit hash of 40 digits, "
            "so that the draft model does not change under the drafter"
        )


def is_embedded(entry: dict[str, str]) -> bool:
    """Whether the draft model is a part of the drafter's own repo."""
    return list(entry) == ["subfolder"]


def find_draft(
    entry: dict[str, str], folder: Path, source: HubSource | None = None, trust_remote_code: bool = False
) -> Path:
    """The folder of the draft model that a drafter in `folder` names.

    Args:
        source: the drafter's, for how another repo is read; needed where the entry names one.
    """
    if "repo_id" in entry:
        assert source is not None, "a draft model in another repo is read as the drafter is"
        wanted = [*PATTERNS, "*.py"] if trust_remote_code else list(PATTERNS)
        subfolder = entry.get("subfolder", "")
        prefix = f"{subfolder}/" if subfolder else ""
        # Straight to the Hub: a folder of that name in the working directory is not what the config means.
        other = replace(source, repo_or_folder=entry["repo_id"], revision=entry["revision"])
        root = other.download([prefix + name for name in wanted])
        draft = root / subfolder
    elif "path" in entry:
        root = folder.resolve().parent  # what lies beside it, wherever the process runs
        draft = root.joinpath(*PurePosixPath(entry["path"]).parts[1:])
    else:
        root, draft = folder, folder / entry["subfolder"]
    if not draft.is_dir() or not draft.resolve().is_relative_to(root.resolve()):
        raise SpeculationError(f"{draft} is missing or a link; it must be the folder with the draft model")
    if "repo_id" not in entry:
        check_no_pickles(draft)
    return draft


def load_draft(
    folder: Path,
    *,
    dtype: Any = "auto",
    device_map: Any = None,
    quantization: str | None = None,
    pack_linear: bool = False,
    trust_remote_code: bool = False,
) -> "PreTrainedModel":
    """Load the model in `folder` after its files were checked.

    Raises:
        SpeculationError: a pickle, an adapter, sizes in config.json that the weights do not have, missing or
            unexpected weights, or a quantization that is not installed.
    """
    config = _checked_config(folder, trust_remote_code)
    extra: dict[str, Any] = {} if device_map is None else {"device_map": device_map}
    if quantization is not None:
        extra["quantization_config"] = quanto_config(quantization)
    with naming(folder / "config.json", "describes a draft model that could not be loaded"):
        try:
            model, report = _auto(config).from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                **extra,
            )
        except ImportError as error:  # of what a `quantization_config` names
            raise SpeculationError(
                "it needs a library that is not installed; install it, or store the draft model without "
                f"quantization_config. transformers says: {shortened(one_line(error))}"
            ) from error
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report.get(problem):
            raise SpeculationError(
                f"{folder}: the draft model's weights have {problem.replace('_keys', '')} entries "
                f"({', '.join(map(str, sorted(report[problem])[:5]))}); save the model again with save_pretrained()"
            )
    if bad := first_not_finite(model.named_parameters()):
        raise SpeculationError(
            f"{folder}: the draft model's weight {bad} holds NaN or infinite values in {model.dtype}; "
            "save the model again, or load it in another dtype"
        )
    if pack_linear:
        packing.pack_linear(model)
    return model.eval()


def _checked_config(folder: Path, trust_remote_code: bool) -> "PreTrainedConfig":
    """The model's config, after every file was found to be plain and the sizes to be those of the weights."""
    for path in folder.iterdir():
        if path.is_symlink() or path.is_file():
            safe_file(folder, path.name)
    if (folder / "adapter_config.json").exists():
        raise SpeculationError(
            f"{folder / 'adapter_config.json'}: this is an adapter without its base model; merge it with "
            "merge_and_unload() and save the whole model"
        )
    content = read_json(folder, "config.json")
    if content.get("auto_map") and not trust_remote_code:
        raise SpeculationError(
            f"{folder / 'config.json'} names Python code of its own (auto_map), which is not run by default; "
            "read it, then pass trust_remote_code=True, or use a model of a family that transformers knows"
        )
    if (folder / GENERATION).exists():
        read_json(folder, GENERATION)
    tensors = {key: info for name in _weight_files(folder) for key, info in tensor_infos(folder, name).items()}
    with naming(folder / "config.json", "does not describe a model"):
        config = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
        if not trust_remote_code:
            _check_sizes(config, tensors, packed="quantization_config" in content)
        _check_window(config.get_text_config())
    config.return_dict = True  # whatever the file says: it is about what a user gets, and here that is us
    return config


def _auto(config: "PreTrainedConfig") -> Any:
    """What loads a draft model. One that reads the target's layers drafts with the target's head."""
    headless = hasattr(config, "target_layer_ids")
    return transformers.AutoModel if headless else transformers.AutoModelForCausalLM


def _weight_files(folder: Path) -> list[str]:
    if not (folder / "model.safetensors.index.json").exists():
        return ["model.safetensors"]
    shards = read_json(folder, "model.safetensors.index.json").get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) and "/" not in name for name in shards.values()):
        raise SpeculationError(
            f"{folder / 'model.safetensors.index.json'}: weight_map must name files in the same folder"
        )
    return sorted(set(shards.values()))


def _check_sizes(config: "PreTrainedConfig", tensors: dict[str, TensorInfo], packed: bool) -> None:
    """Nothing is allocated for a model that config.json makes larger than its weights."""
    stored = sum(torch.Size(shape).numel() for _, shape in tensors.values())
    most = stored * MOST_PER_WORD if packed else stored
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    declared, tables = None, set()
    if layers <= len(tensors):  # else even a model without memory takes long to build
        with torch.device("meta"):
            model = _auto(config).from_config(config)
        declared = model.num_parameters()
        tables = {name for name, buffer in model.named_buffers() if not buffer.is_floating_point()}
    floating = (*FLOATING, LIGHT)  # transformers reads the latter as config.json's dtype
    wrong = sorted(key for key, (dtype, _) in tensors.items() if dtype not in floating and key not in tables)
    if wrong and not packed:
        raise SpeculationError(f"the weight {wrong[0]} is {tensors[wrong[0]][0]}, and must be a floating type")
    if declared is None or declared > most:
        size = f"{layers} layers" if declared is None else f"{declared} parameters"
        raise SpeculationError(
            f"it declares {size}, but the safetensors files hold {stored} values in "
            f"{len(tensors)} tensors; save the model again with save_pretrained()"
        )


def _check_window(config: "PreTrainedConfig") -> None:
    """A token must see another one; transformers' cache for windows of 1 gives other logits than no cache."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if window is not None and (kinds is None or "sliding_attention" in kinds) and not 2 <= window < 1 << 31:
        raise SpeculationError(
            f"sliding_window is {window}; it must be from 2 to {(1 << 31) - 1}, or null for attention to all tokens"
        )


def quanto_config(quantization: str) -> Any:
    """What `from_pretrained` takes for weights of 8 or 4 bits.

    Raises:
        SpeculationError: an unknown quantization, or optimum-quanto is not installed.
    """
    if quantization not in QUANTIZATIONS:
        raise SpeculationError(f"quantization is {quantization!r}; it must be one of {', '.join(QUANTIZATIONS)}")
    try:
        import optimum.quanto  # noqa: F401
    except ImportError as error:
        raise SpeculationError(
            f"quantization={quantization!r} needs optimum-quanto; pip install 'hf-specdec[quantization]'"
        ) from error
    return transformers.QuantoConfig(weights=quantization)
