"""`Allowance`: what may be downloaded without being asked for, and a line about each download."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import DryRunError
from huggingface_hub.utils import get_session

from ..errors import SpeculationError, one_line, warn
from .draft import PATTERNS, is_embedded
from .files import HubSource, check_relative
from .loading import CONFIG, WEIGHTS, read_config

GIGABYTE = 1_000_000_000
WORTH_SAYING = 10_000_000
"""bytes; configs and small tables come without a word"""
PATIENCE = 5.0
"""seconds in which the Hub answers at all"""


class Allowance:
    """Bytes that may be downloaded, all together. What is in the Hub cache costs nothing. Without the network, or with
    nothing allowed, the cache is all there is."""

    def __init__(self, gigabytes: float) -> None:
        self.gigabytes, self.left = gigabytes, gigabytes * GIGABYTE

    @cached_property
    def asks(self) -> bool:
        """Whether the Hub may be asked anything, and answers: downloads wait minutes for one that does not."""
        if self.gigabytes <= 0 or constants.HF_HUB_OFFLINE:
            return False
        try:
            get_session().head(constants.ENDPOINT, timeout=PATIENCE)
        except Exception:  # whatever a network can do
            return False
        return True

    def model(self, source: HubSource) -> Path:
        """The folder of a model that drafts.

        Raises:
            SpeculationError: it cannot be read, or is too large.
        """
        return self.folder(source, PATTERNS)

    def drafter(self, source: HubSource) -> HubSource:
        """The source of a drafter, at the commit that was fetched, with the draft model that it names.

        Raises:
            SpeculationError: it cannot be read, or is too large.
        """
        folder = self.folder(source, [CONFIG, WEIGHTS])
        source, entry = source.at_commit_of(folder), read_config(folder)[1].draft_model
        if entry is not None and is_embedded(entry):
            self.folder(source, [f"{entry['subfolder']}/{pattern}" for pattern in PATTERNS])
        elif entry is not None and "repo_id" in entry:
            subfolder = entry.get("subfolder", "")
            self.model(HubSource(entry["repo_id"], subfolder=subfolder, revision=entry["revision"], token=source.token))
        return source if self.asks else replace(source, local_files_only=True)

    def folder(self, source: HubSource, patterns: Sequence[str]) -> Path:
        """The local folder with these files, downloaded where it may be.

        Raises:
            SpeculationError: they cannot be read, or are too large.
        """
        if source.is_local:
            return source.folder(patterns)
        if not self.asks or source.local_files_only:
            return replace(source, local_files_only=True).folder(patterns)
        return self._paid(source, patterns).folder(patterns)

    def _paid(self, source: HubSource, patterns: Sequence[str]) -> HubSource:
        """The source at the commit whose sizes were looked at, or in the cache where the Hub does not answer."""
        prefix = check_relative(source.subfolder, "subfolder") + "/" if source.subfolder else ""
        try:
            files = snapshot_download(
                str(source.repo_or_folder),
                allow_patterns=[prefix + pattern for pattern in patterns],
                revision=source.revision,
                token=source.token,
                cache_dir=source.cache_dir,
                dry_run=True,
            )
        except DryRunError as error:
            cached = replace(source, local_files_only=True)
            try:
                cached.folder(patterns)
            except SpeculationError:
                why = one_line(error.__cause__ or error)
                raise SpeculationError(f"{source.repo_or_folder!r} could not be read from the Hub: {why}") from error
            return cached
        except Exception as error:  # no such revision, a name that is none, a proxy
            raise SpeculationError(
                f"{source.repo_or_folder!r} could not be read from the Hub: {one_line(error)}"
            ) from error
        size = sum(file.file_size or 0 for file in files if file.will_download)
        if size > self.left:
            raise SpeculationError(
                f"{source.repo_or_folder!r} takes a download of {size / GIGABYTE:.2f} GB, and max_download_gb="
                f"{self.gigabytes:g} allows {self.left / GIGABYTE:.2f}; allow it with "
                f'speculation={{"max_download_gb": {-(-size // GIGABYTE)}}}'
            )
        self.left -= size
        if size > WORTH_SAYING:
            warn(
                f"downloading {source.repo_or_folder} ({size / GIGABYTE:.2f} GB), which drafts; "
                'speculation={"max_download_gb": 0} prevents it'
            )
        return replace(source, revision=files[0].commit_hash) if files else source
