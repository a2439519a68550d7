"""Kneser-Ney counting over a stream of token ids: one pass per order, with memory for the counts, not for the text."""

import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from ..drafters.ngram import Level, NGramDrafter, NGramModel
from ..errors import SpeculationError
from ..hub.tokenizer import fingerprint
from ..tools.loading.models import TargetSettings, load_tokenizer
from ..tools.loading.outputs import writable_folder
from ..tools.loading.rows import read_rows
from .folder import interruptible

CHUNK = 1 << 20
"""Tokens worked on at once."""


def train_ngram_drafter(
    tokenizer: Any,
    files: Iterable[str | Path],
    order: int = 3,
    min_count: int = 1,
    num_draft_tokens: int | Literal["auto"] = "auto",
    output: str | Path | None = None,
) -> NGramDrafter:
    """Train an n-gram drafter on text.

    Args:
        tokenizer: the target's tokenizer, or the name or folder it loads from.
        files: text, one document per line, or JSON lines or data sets of the Hub (`ORG/NAME` or `ORG/NAME:SPLIT`), the
            strings of a row joined to one document.
        order: 2 is a bigram model; 1 to 6.
        min_count: n-grams of order 2 and more that occur less often are left out.
        num_draft_tokens: of the drafter, see `NGramDrafter`.
        output: folder to save it to, if one is named.

    Raises:
        SpeculationError: an option out of range, a file that cannot be read, no text, or a folder that cannot be
            written.
    """
    files, count = list(files), _Count()
    for file in files:
        if not Path(file).is_fifo():  # which can be opened once
            next(_documents(file), None)
    if output is not None:
        writable_folder(output)
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(TargetSettings(target=str(tokenizer)))
    with interruptible("nothing was saved; the same command starts from the beginning"):
        model = train_ngram(count.of(token_stream(tokenizer, files)), len(tokenizer), order, min_count)
    drafter = NGramDrafter(model, num_draft_tokens=num_draft_tokens, tokenizer=fingerprint(tokenizer))
    drafter.trained_on = (
        f"{count.tokens:,} tokens in {count.documents:,} documents of {', '.join(Path(file).name for file in files)}; "
        f"n-grams up to order {order}" + (f" that occur at least {min_count} times" if min_count > 1 else "") + "."
    )
    if output is not None:
        drafter.save_pretrained(output)
    return drafter


class _Count:
    """What went by."""

    documents = tokens = 0

    def of(self, documents: Iterable[list[int]]) -> Iterator[list[int]]:
        for ids in documents:
            self.documents, self.tokens = self.documents + 1, self.tokens + len(ids)
            yield ids


def token_stream(tokenizer: Any, files: Iterable[str | Path]) -> Iterator[list[int]]:
    """The token ids of each document, with the end-of-text token where the tokenizer has one."""
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    for file in files:
        for text in tqdm(_documents(file), desc=f"reading {Path(file).name}", unit=" documents"):
            yield tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] + end


def _documents(source: str | Path) -> Iterator[str]:
    """The text of each line or row. A file's lines may be of any length, and any JSON value."""
    path = Path(source)
    texts: Iterator[str]
    if not path.is_file() and not path.is_fifo():
        texts = (_text(row) for _, row in read_rows(source, split="train"))
    elif path.suffix in (".jsonl", ".json"):
        texts = (_text(_value(line, f"{path}, line {number}")) for number, line in enumerate(_lines(path), 1) if line)
    else:
        texts = _lines(path)
    yield from filter(None, texts)


def _lines(file: Path) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8") as lines:
            yield from map(str.strip, lines)
    except UnicodeDecodeError as error:
        raise SpeculationError(f"{file} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise SpeculationError(f"cannot read {file}: {error.strerror or error}") from error


def _value(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise SpeculationError(f"{where} is not JSON ({error}); every line must be one JSON value") from error


def _text(row: Any) -> str:
    """The strings of a row, one below the other, those in its lists too."""
    if isinstance(row, str):
        return row
    values = row.values() if isinstance(row, dict) else row if isinstance(row, list) else ()
    return "\n".join(filter(None, map(_text, values)))


def train_ngram(documents: Iterable[list[int]], vocab_size: int, order: int = 3, min_count: int = 1) -> NGramModel:
    """An interpolated Kneser-Ney model of `documents`, each a list of token ids; n-grams do not cross documents.

    The ids go to a temporary file first and are read once per order.

    Raises:
        SpeculationError: an argument out of range, no tokens, or an id outside the vocabulary.
    """
    for name, value, least, most in (("order", order, 1, 6), ("min_count", min_count, 1, 1 << 30)):
        if not least <= value <= most:
            raise SpeculationError(f"{name} must be from {least} to {most}, got {value}")
    with tempfile.TemporaryFile() as file:
        length = 0
        for ids in documents:
            document = np.array([-1, *ids], dtype=np.int32)  # -1 parts documents: no n-gram holds it
            if document.max() >= vocab_size or (document[1:] < 0).any():
                raise SpeculationError(f"documents hold a token id outside 0 to vocab_size - 1 = {vocab_size - 1}")
            file.write(document.tobytes())
            length += len(document)
        if not length:
            raise SpeculationError("the data holds no text to train on; give at least one line")
        file.flush()
        stream = np.memmap(file, dtype=np.int32, mode="r")
        return _fit(stream, vocab_size, order, min_count)


def _fit(stream: np.ndarray, vocab_size: int, order: int, min_count: int) -> NGramModel:
    keys: list[np.ndarray] = []  # per order from 2: sorted n-gram keys that are kept
    pruned: list[np.ndarray] = []  # per order from 2: occurrences left out, by the id of their context
    suffixes: list[np.ndarray] = [np.zeros(vocab_size, dtype=np.int64)]  # per order: id without the oldest token
    counts = [_count_unigrams(stream, vocab_size)]
    for n in range(2, order + 1):
        found, count = _count_ngrams(stream, vocab_size, keys)
        prefix, token = np.divmod(found, vocab_size)
        suffix = token if n == 2 else _lookup(keys[-1], suffixes[-1][prefix] * vocab_size + token)
        # Kneser-Ney: a lower order counts in how many contexts an n-gram was seen, not how often.
        seen_in = np.bincount(suffix[suffix >= 0], minlength=len(counts[-1]))
        counts[-1] = np.maximum(seen_in, counts[-1] > 0)
        kept = (count >= min_count) & (suffix >= 0)
        pruned.append(np.bincount(prefix[~kept], count[~kept], len(counts[-1])))
        keys, suffixes, counts = [*keys, found[kept]], [*suffixes, suffix[kept]], [*counts, count[kept]]
    return _discount(keys, counts, pruned, vocab_size)


def _count_unigrams(stream: np.ndarray, vocab_size: int) -> np.ndarray:
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(stream), CHUNK):
        chunk = stream[start : start + CHUNK]
        counts += np.bincount(chunk[chunk >= 0], minlength=vocab_size)
    return counts


def _count_ngrams(stream: np.ndarray, vocab_size: int, keys: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Sorted keys and counts of the n-grams one order above those in `keys`, whose prefix was kept."""
    n = len(keys) + 2
    runs = [(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))]
    for start in range(0, len(stream), CHUNK):
        chunk = stream[start : start + CHUNK + n - 1].astype(np.int64)
        width = max(0, len(chunk) - n + 1)
        node = chunk[:width]
        for i in range(1, n):
            token = chunk[i : i + width]
            key = np.where((node >= 0) & (token >= 0), node * vocab_size + token, -1)
            node = _lookup(keys[i - 1], key) if i < n - 1 else key
        runs.append(np.unique(node[node >= 0], return_counts=True))
        if sum(len(run) for run, _ in runs[1:]) > len(runs[0][0]):  # so that the table is seldom sorted again
            runs = [_merge(runs)]
    return _merge(runs)


def _merge(runs: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Join sorted keys and their counts."""
    found, places = np.unique(np.concatenate([key for key, _ in runs]), return_inverse=True)
    count = np.bincount(places, np.concatenate([count for _, count in runs]), len(found))
    return found, count.astype(np.int64)


def _lookup(keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The place of each wanted key in the sorted keys, or -1."""
    if not len(keys):
        return np.full(len(wanted), -1)
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, places, -1)


def _discount(
    keys: list[np.ndarray], counts: list[np.ndarray], pruned: list[np.ndarray], vocab_size: int
) -> NGramModel:
    """Turn counts into discounted probabilities and the mass λ that each context passes to the shorter one."""
    c, d = counts[0].astype(np.float64), _absolute_discount(counts[0])
    unigram = np.maximum(c - d, 0) / c.sum()
    unigram += (1 - unigram.sum()) / vocab_size
    backoffs: list[np.ndarray] = []
    levels: list[tuple[np.ndarray, np.ndarray]] = []
    for key, count, left_out in zip(keys, counts[1:], pruned, strict=True):
        context, size = key // vocab_size, len(left_out)
        total = np.bincount(context, count, size) + left_out
        prob = np.maximum(count - _absolute_discount(count), 0) / total[context]
        backoffs.append((1 - np.bincount(context, prob, size)).clip(0, 1))
        levels.append((key, prob))
    backoffs.append(np.ones(len(counts[-1])))
    tables = [
        Level(key, prob.astype(np.float32), backoff.astype(np.float32))
        for (key, prob), backoff in zip(levels, backoffs[1:], strict=True)
    ]
    return NGramModel(unigram.astype(np.float32), backoffs[0].astype(np.float32), tables)


def _absolute_discount(counts: np.ndarray) -> float:
    """D = n1 / (n1 + 2·n2) from the numbers of n-grams seen once and twice (Ney, Essen and Kneser 1994)."""
    n1, n2 = int((counts == 1).sum()), int((counts == 2).sum())
    return float(np.clip(n1 / (n1 + 2 * n2), 0.1, 0.9)) if n1 else 0.5
