"""`AnswerFile`: a line of JSON for each prompt, in the prompts' order, whatever stops those who write it."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ..errors import SpeculationError, shown


class AnswerFile:
    """Answers to many prompts, which a rerun goes on with.

    Lines are appended to `PATH.part` as they come. `finish` puts them in order and into `PATH`, in one step. Whoever
    begins anew finds what is missing; a line that was torn when its writer died is missing, and so is one that holds
    an error. Several processes share a file if each names a part of its own, and none adds before all have begun.

        file = AnswerFile("answers.jsonl", prompts)
        for number in file.missing:
            file.add(number, text=answer(prompts[number]))
        file.finish()
    """

    def __init__(self, path: str | Path, prompts: Sequence[Any], settings: Any = None, part: int | None = None) -> None:
        """
        Args:
            prompts: texts, or other JSON values; one that is there twice is answered twice.
            settings: whatever else the answers depend on, as a JSON value; a file holds answers of one kind.
            part: number of this process, where several write: its lines go to `PATH.part-NUMBER`.

        Raises:
            SpeculationError: the file cannot be written, or holds lines that answer none of these prompts.
        """
        self.path, self.prompts, self.ids = Path(path), prompts, list(_ids(prompts, settings))
        self._part = self.path.with_name(f"{self.path.name}.part" + ("" if part is None else f"-{part}"))
        if self.path.is_dir():
            raise SpeculationError(f"path must name a file, got the folder {str(path)!r}; name a file in it")
        held = self._held()
        if strange := held.keys() - set(self.ids):
            raise SpeculationError(
                f"{path} holds {len(strange)} lines that answer none of these {len(prompts)} prompts under these "
                "settings; name another file, or repeat the run that wrote it"
            )
        self.missing = [number for number, name in enumerate(self.ids) if "error" in held.get(name, {"error": ""})]
        """numbers of the prompts, from 0, that had no answer when this was made"""

    def add(self, number: int, **fields: Any) -> None:
        """Keep the answer to prompt `number`: `text`, `stats`, or whatever is known of it; `error` if there is none.

        Raises:
            SpeculationError: the line cannot be written.
        """
        line = _line({"id": self.ids[number], "prompt": self.prompts[number], **fields})
        try:
            with self._part.open("ab+") as file:
                file.seek(max(0, file.tell() - 1))
                torn = file.read(1) not in (b"", b"\n")
                file.write(b"\n" * torn + line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise SpeculationError(f"cannot write to {self._part}: {error.strerror or error}") from error

    def finish(self) -> None:
        """Write all lines to the file in the prompts' order, and remove the parts. Called once, after all have ended.

        Raises:
            SpeculationError: a prompt has no line yet, or the file cannot be written.
        """
        held = self._held()
        if without := [number for number, name in enumerate(self.ids) if name not in held]:
            raise SpeculationError(
                f"{len(without)} of {len(self.ids)} prompts have no answer yet, the first is number {without[0]}; "
                "run again, which answers those only"
            )
        whole = self.path.with_name(f"{self.path.name}.whole")
        try:
            with whole.open("wb") as file:
                file.writelines(_line(held[name]) for name in self.ids)
                file.flush()
                os.fsync(file.fileno())
            whole.replace(self.path)
            for part in self._parts():
                part.unlink()
        except OSError as error:
            raise SpeculationError(f"cannot write {self.path}: {error.strerror or error}") from error

    def _parts(self) -> list[Path]:
        of_all = f"{self.path.name}.part"
        return sorted(path for path in self.path.parent.iterdir() if f"{path.name}-".startswith(f"{of_all}-"))

    def _held(self) -> dict[str, dict[str, Any]]:
        """The lines that are there by now, by their prompt's id; an answer stays, whatever error comes after it."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            finished = self.path.read_bytes().splitlines() if self.path.exists() else []
            begun = [line for part in self._parts() for line in part.read_bytes().splitlines()]
        except OSError as error:
            raise SpeculationError(f"cannot use {str(self.path)!r}: {error.strerror or error}") from error
        lines = [_read(line) for line in finished]
        if any("id" not in line for line in lines):
            raise SpeculationError(f"{self.path} exists and holds something else than answers; name another file")
        held: dict[str, dict[str, Any]] = {}
        for line in [*lines, *filter(None, map(_read, begun))]:
            if "error" in held.get(line["id"], {"error": ""}):
                held[line["id"]] = line
        return held


def _line(said: dict[str, Any]) -> bytes:
    return json.dumps(said, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def _read(line: bytes) -> dict[str, Any]:
    """What a line says; nothing if it is torn: no beginning of a JSON object is one."""
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _ids(prompts: Sequence[Any], settings: Any) -> Iterator[str]:
    """A name for each prompt that another run gives it, too, wherever it stands there."""
    seen: Counter[str] = Counter()
    for prompt in prompts:
        try:
            text = json.dumps([settings, prompt], sort_keys=True)
        except (TypeError, ValueError) as error:
            raise SpeculationError(f"prompts and settings must be JSON values, got {shown(prompt)}: {error}") from error
        yield blake2b(f"{seen[text]} {text}".encode(), digest_size=8).hexdigest()
        seen[text] += 1
