"""Moonshine tiny, a speech model of 27 M parameters, out of a package that ships it, as one of transformers'.

`pip install --no-deps moonshine-voice==0.1.0` holds its English weights and a few recordings, under the MIT licence;
`pip install onnxruntime flatbuffers` reads the format they are stored in: in 8 bits, which become floats here.
"""

import importlib.util
import sys
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import MoonshineConfig, MoonshineForConditionalGeneration

RATE = 16_000
"""samples per second"""
TYPES = {1: np.float32, 2: np.uint8, 3: np.int8}
"""of the stored weights that are wanted"""
NORM = {"/groupnorm/Mul": "groupnorm.weight", "/groupnorm/Add": "groupnorm.bias"}


def assets() -> Path:
    """Where the package holds what it ships; it is not imported, for that would load its own library."""
    found = importlib.util.find_spec("moonshine_voice")
    if found is None or found.origin is None:
        raise SystemExit("pip install --no-deps moonshine-voice==0.1.0")
    return Path(found.origin).parent / "assets"


def load_moonshine() -> Any:
    """The model."""
    config = MoonshineConfig(hidden_size=288, intermediate_size=1152, max_position_embeddings=194, bos_token_id=1)
    model = MoonshineForConditionalGeneration(config)
    weights: dict[str, Tensor] = {}
    for part, prefix in (("encoder_model", "model.encoder."), ("decoder_model_merged", "")):
        weights |= {prefix + name: value for name, value in stored(assets() / "tiny-en" / f"{part}.ort").items()}
    weights["proj_out.weight"] = weights["model.decoder.embed_tokens.weight"]
    model.load_state_dict({name: weights[name].reshape(value.shape) for name, value in model.state_dict().items()})
    return model.eval()


def stored(file: Path) -> dict[str, Tensor]:
    """A file's weights by the names of the modules they were exported from."""
    package = importlib.util.find_spec("onnxruntime")
    if package is None or package.origin is None:
        raise SystemExit("pip install onnxruntime flatbuffers")
    sys.path.append(str(Path(package.origin).parent / "tools" / "ort_format_model"))
    from ort_flatbuffers_py.fbs.InferenceSession import InferenceSession

    graph = InferenceSession.GetRootAsInferenceSession(file.read_bytes(), 0).Model().Graph()
    arrays: dict[str, np.ndarray] = {}
    found: dict[str, Tensor] = {}
    for part in graphs(graph):
        for tensor in (part.Initializers(i) for i in range(part.InitializersLength())):
            if tensor.DataType() in TYPES and not tensor.RawDataIsNone():
                shape = [tensor.Dims(i) for i in range(tensor.DimsLength())]
                array = tensor.RawDataAsNumpy().view(TYPES[tensor.DataType()]).reshape(shape)
                arrays[tensor.Name().decode()] = array
    for name, array in arrays.items():
        plain = name.partition("_merged_")[0].removesuffix("_add_tensor")
        if name.endswith("_quantized"):
            found[plain] = floats(arrays, name)
        elif array.dtype == np.float32 and not name.endswith("_scale"):
            found[plain] = torch.tensor(array)
    for part in graphs(graph):
        for node in (part.Nodes(i) for i in range(part.NodesLength())):
            name, inputs = node.Name().decode(), [node.Inputs(i).decode() for i in range(node.InputsLength())]
            module = name.removeprefix("/").rpartition("/")[0].replace("/", ".")
            if name.endswith("/MatMul_quant"):
                found[f"{module}.weight"] = floats(arrays, inputs[1]).T.contiguous()
            elif name in NORM:
                found[NORM[name]] = torch.tensor(arrays[inputs[1]])
    return found


def graphs(graph: Any) -> Iterator[Any]:
    """It and those inside of it."""
    yield graph
    for node in (graph.Nodes(i) for i in range(graph.NodesLength())):
        for inner in (node.Attributes(i).G() for i in range(node.AttributesLength())):
            if inner is not None:
                yield from graphs(inner)


def floats(arrays: dict[str, np.ndarray], name: str) -> Tensor:
    """Weights that are stored in 8 bits."""
    scale, zero = (arrays[name.replace("_quantized", end)] for end in ("_scale", "_zero_point"))
    return torch.tensor((arrays[name].astype(np.float32) - zero.astype(np.float32)) * scale)


def words() -> list[str]:
    """The text of each token."""
    data, at, found = (assets() / "tiny-en" / "tokenizer.bin").read_bytes(), 0, []
    while at < len(data):
        size, at = data[at], at + 1
        if size >= 128:
            size, at = size - 128 + 128 * data[at], at + 1
        found.append(data[at : at + size].decode(errors="replace").replace("\u2581", " "))
        at += size
    return found


def recording(name: str, seconds: float) -> list[Tensor]:
    """One of the package's recordings in pieces of about so many seconds, cut where it is quiet."""
    with wave.open(str(assets() / name)) as file:
        sound = np.frombuffer(file.readframes(file.getnframes()), dtype=np.int16).astype(np.float32) / 32768
        sound = sound.reshape(-1, file.getnchannels()).mean(1)
        rate = file.getframerate()
    width = rate // RATE if rate % RATE == 0 else 1  # a mean over neighbours, before they are dropped
    smooth = np.convolve(sound, np.ones(width, dtype=np.float32) / width, "same")
    times = np.arange(int(len(smooth) * RATE / rate)) * rate / RATE
    sound = np.interp(times, np.arange(len(smooth)), smooth).astype(np.float32)
    pieces, begin, size = [], 0, int(seconds * RATE)
    while len(sound) - begin > size:
        loud = np.abs(sound[begin + size // 2 : begin + size])
        level = np.convolve(loud, np.ones(RATE // 5) / (RATE // 5), "same")
        end = begin + size // 2 + int(level.argmin())
        pieces.append(sound[begin:end])
        begin = end
    return [torch.tensor(piece) for piece in [*pieces, sound[begin:]] if len(piece) > RATE]
