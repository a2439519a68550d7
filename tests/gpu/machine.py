"""The machine: which card, which versions, and whether it computes at all."""

import hashlib
import importlib.metadata
import os
from pathlib import Path

import torch
from place import DEVICE, note, synchronize

from hf_specdec.tools.instruments.provenance import provenance

ROOT = Path(__file__).parent.parent.parent
NAMES = ("torch", "transformers", "accelerate", "safetensors", "tokenizers", "triton", "gguf", "kernels", "flash-attn")


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def sources() -> str:
    """Of the package as it is here: a machine without git knows no commit."""
    files = sorted((ROOT / "hf_specdec").rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def main() -> None:
    x = torch.randn(64, 64, device=DEVICE)
    assert torch.allclose((x @ x).cpu(), x.cpu() @ x.cpu(), atol=1e-3), "the device multiplies wrongly"
    synchronize()
    known = provenance(DEVICE)
    known["versions"] |= {name: version(name) for name in NAMES}
    known["git_revision"] = os.environ.get("COMMIT") or known["git_revision"]
    note("machine", **known, sources=sources())
    print(known)


if __name__ == "__main__":
    main()
